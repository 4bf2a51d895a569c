"""The layer of a decoder of the Llama family in plain torch, with the attention as an argument, and its block. The
modules hold weights only; key-value caches are arguments.
"""

import copy
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.activation import activated
from foretell.model.block.attention import AttentionBackend
from foretell.model.block.layer_inputs import LayerInput
from foretell.model.block.linear import AnyLinear, Linear, widen
from foretell.model.block.moe import DenseAndExperts, ExpertFeedForward
from foretell.model.block.rope import RopeAngles, apply_rope
from foretell.model.block.state_layers import StateMixer
from foretell.model.config.model import Activation, NormedHeads
from foretell.model.triton import run, runs_kernels

Stream: TypeAlias = Float[torch.Tensor, "*t d"]
"""The residual stream, or what a norm or a sub-layer makes of it."""
M = TypeVar("M", bound=nn.Module)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich, arXiv 1910.07467) over the last axis, computed in float32 or wider."""

    def __init__(self, weight: Float[torch.Tensor, " d"], eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float() + offset, requires_grad=False)
        self.eps = eps

    def forward(self, x: Stream, dtype: torch.dtype | None = None) -> Stream:
        """Normalise and scale. `dtype`: of the output; None: that of the input."""
        wide, dtype = widen(x), dtype or x.dtype
        if wide.dtype == torch.float32 and runs_kernels(wide):
            from foretell.model.triton import elementwise

            return run(elementwise.rms_norm(wide, self.weight, self.eps, dtype))
        return F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps).to(dtype)


def sharing(module: M) -> M:
    """A copy of the same weights, whose modules can be replaced."""
    out = copy.copy(module)
    out._modules = dict(module._modules)
    return out


def _norm_for(norm: nn.Module, x: Stream, reader: nn.Module) -> Stream:
    """The output of a norm that only `reader` reads, in the dtype that it would round it to."""
    rounds = isinstance(norm, RMSNorm) and isinstance(reader, Linear)
    out: torch.Tensor = norm(x, reader.weight.dtype) if rounds else norm(x)
    return out


class FeedForward(nn.Module):
    """Feed-forward network; `gate_up` holds the rows of the gate projection, if there is one, then those of the up
    projection.
    """

    def __init__(self, gate_up: AnyLinear, down: AnyLinear, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: Stream) -> Stream:
        """`down(activation(gate(x)) * up(x))`."""
        return gated_mlp(x, self.gate_up, self.down, self.activation)


def gated_mlp(x: Stream, gate_up: nn.Module, down: nn.Module, activation: Activation) -> Stream:
    """Gated feed-forward network (Shazeer, arXiv 2002.05202): `down(activation(gate(x)) * up(x))`."""
    out: torch.Tensor = down(activated(gate_up(x), activation))
    return out


def _add(x: torch.Tensor, part: torch.Tensor, scale: float) -> torch.Tensor:
    return x + part if scale == 1 else x + part * scale


def _shortcut(x: torch.Tensor, matrix: nn.Module | None) -> torch.Tensor:
    if matrix is None:
        return x
    out: torch.Tensor = matrix(x)
    return out.to(x.dtype)


def _normed(p: "LayerModules | DecoderBlock", qk: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries, as many as heads, and keys with their norms, where these exist."""
    if p.q_norm is None or p.k_norm is None:
        return qk
    parts = [(p.q_norm, qk[..., :heads, :]), (p.k_norm, qk[..., heads:, :])]
    if p.qk_norm_over == "all":
        return torch.cat([norm(part.flatten(-2)).view(part.shape) for norm, part in parts], -2)
    return torch.cat([norm(part) for norm, part in parts], -2)


def centered(x: Stream) -> Stream:
    """Rows less their means."""
    return x - x.mean(-1, keepdim=True)


class HeadSizes(Protocol):
    """Sizes of the attention heads in the rows of `qkv`."""

    @property
    def heads(self) -> int: ...  # noqa: D102
    @property
    def kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


Projected = tuple[
    Float[torch.Tensor, "*t h e"], Float[torch.Tensor, "*t g e"] | None, Float[torch.Tensor, "*t g e"] | None
]
"""Queries, keys and values; None: those of an earlier layer."""
StreamAndRoutes = tuple[Stream, Int[torch.Tensor, "t k"] | None]
"""The residual stream, and every token's experts (None: the layer is dense)."""


class LayerModules(NamedTuple):
    """The modules of a decoder layer under common names. None: the architecture has no such norm."""

    qkv: nn.Module
    output: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    post_attention_norm: nn.Module | None = None
    post_mlp_norm: nn.Module | None = None
    mixer: StateMixer | None = None
    attention_gate: bool = False
    """The rows of `qkv` end with a gate per query head."""
    residual_scale: float = 1.0
    sinks: Float[torch.Tensor, " h"] | None = None
    """A number per query head that joins the softmax over its keys (gpt-oss)."""
    v_norm: nn.Module | None = None
    reads_keys: bool = False
    """Keys and values are those of an earlier layer: `qkv` gives queries only."""
    attention_shortcut: nn.Module | None = None
    """Multiplies the residual stream before the output of attention is added (SliceGPT)."""
    mlp_shortcut: nn.Module | None = None
    qk_norm_over: NormedHeads = "head"
    parallel: bool = False
    """The feed-forward network has the input of the attention."""


class DecoderLayer(nn.Module, ABC):
    """The forward pass of one decoder layer, with the attention as an argument: decoding and training share it."""

    @property
    @abstractmethod
    def layer_modules(self) -> "LayerModules | DecoderBlock":
        """Its modules."""

    def project(
        self, x: Float[torch.Tensor, "*t i"], sizes: HeadSizes, angles: RopeAngles | None
    ) -> tuple[Float[torch.Tensor, "*t h e"], Float[torch.Tensor, "*t g e"], Float[torch.Tensor, "*t g e"]]:
        """Rotated queries, rotated keys, and values from the input of the attention.

        Raises:
            ValueError: the layer reads the keys and values of an earlier one.
        """
        q, k, v = self._rotated(self.layer_modules.qkv(x), sizes, angles)
        if k is None or v is None:
            raise ValueError("layers that share keys and values are not supported in this training")
        return q, k, v

    def _rotated(
        self, projected: Float[torch.Tensor, "*t p"], sizes: HeadSizes, angles: RopeAngles | None
    ) -> Projected:
        p, h, g = self.layer_modules, sizes.heads, sizes.kv_heads
        if p.reads_keys:
            queries = projected.unflatten(-1, (h, sizes.head_dim))
            queries = queries if p.q_norm is None else p.q_norm(queries)
            return queries if angles is None else apply_rope(queries, angles), None, None
        heads = projected[..., : (h + 2 * g) * sizes.head_dim].unflatten(-1, (h + 2 * g, sizes.head_dim))
        qk, v = heads[..., : h + g, :], heads[..., h + g :, :]
        if p.qk_norm_over != "rotated":
            qk = _normed(p, qk, h)
        if angles is not None:
            qk = apply_rope(qk, angles)
        if p.qk_norm_over == "rotated":
            qk = _normed(p, qk, h)
        if p.v_norm is not None:
            v = p.v_norm(v)
        return qk[..., :h, :], qk[..., h:, :], v

    def add_attention(
        self,
        x: Stream,
        attention_input: Float[torch.Tensor, "*t i"],
        sizes: HeadSizes,
        angles: RopeAngles | None,
        layer: int,
        attention: AttentionBackend,
    ) -> Stream:
        """Add the attention to the residual stream `x`; `layer` is the layer's index for `attention`."""
        p = self.layer_modules
        projected = p.qkv(attention_input)
        if p.mixer is not None:
            mixed: torch.Tensor = p.mixer(projected, attention_input, attention.states(layer))
        else:
            later = attention.rotates and p.qk_norm_over != "rotated"
            q, k, v = self._rotated(projected, sizes, None if later else angles)
            if later:
                mixed = attention.rotate_and_attend(layer, q, k, v, angles, p.sinks)
            elif k is None or v is None:
                mixed = attention.attend_shared(layer, q, p.sinks)
            else:
                mixed = self.merge_heads(attention.attend(layer, q, k, v, p.sinks))
        if p.attention_gate:
            mixed = mixed * torch.sigmoid(projected[..., -mixed.shape[-1] :])
        part: torch.Tensor = p.output(mixed)
        x = self.shortcut_attention(x)
        return _add(x, part if p.post_attention_norm is None else p.post_attention_norm(part), p.residual_scale)

    def merge_heads(self, out: Float[torch.Tensor, "*t he"]) -> Float[torch.Tensor, "*t hv"]:
        """The input of the output projection from the output of the attention."""
        return out

    def shortcut_attention(self, x: Stream) -> Stream:
        """The residual stream that the output of attention is added to."""
        return _shortcut(x, self.layer_modules.attention_shortcut)

    def shortcut_mlp(self, x: Stream) -> Stream:
        """The residual stream that the output of the feed-forward network is added to."""
        return _shortcut(x, self.layer_modules.mlp_shortcut)

    def add_mlp(self, x: Stream, before: Stream | None = None) -> StreamAndRoutes:
        """Add the feed-forward network to the residual stream; returns also every token's experts (None: dense).
        `before`: the stream before the attention, which parallel blocks read.
        """
        p, routes = self.layer_modules, None
        stream = before if p.parallel and before is not None else x
        part = _norm_for(p.mlp_norm, stream, p.mlp.gate_up) if isinstance(p.mlp, FeedForward) else p.mlp_norm(stream)
        if isinstance(p.mlp, DenseAndExperts):
            flat, routes = p.mlp.forward_with_routes(part.flatten(0, -2), x.flatten(0, -2))
            part = flat.view_as(x)
        elif isinstance(p.mlp, ExpertFeedForward):
            flat, routes = p.mlp.forward_with_routes(part.flatten(0, -2))
            part = flat.view_as(x)
        else:
            part = p.mlp(part)
        x = self.shortcut_mlp(x)
        return _add(x, part if p.post_mlp_norm is None else p.post_mlp_norm(part), p.residual_scale), routes


class DecoderBlock(DecoderLayer):
    """One decoder block; `qkv` holds all query heads' rows, then all key heads', then all value heads', then all query
    heads' gates where attention is gated. A block with a `mixer` has that in place of attention, and `qkv` is its input
    projection. Where the architecture has only one sub-layer in a block, the other's modules have no weights.
    """

    def __init__(
        self,
        attention_norm: RMSNorm | None,
        qkv: nn.Module,
        output: AnyLinear,
        mlp_norm: RMSNorm | None,
        mlp: FeedForward | ExpertFeedForward | DenseAndExperts,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        post_attention_norm: RMSNorm | None = None,
        post_mlp_norm: RMSNorm | None = None,
        mixer: StateMixer | None = None,
        attention_gate: bool = False,
        residual_scale: float = 1.0,
        sinks: Float[torch.Tensor, " h"] | None = None,
        v_norm: RMSNorm | None = None,
        reads_keys: bool = False,
        layer_input: LayerInput | None = None,
        scale: Float[torch.Tensor, " 1"] | None = None,
        attention_shortcut: Linear | None = None,
        mlp_shortcut: Linear | None = None,
        qk_norm_over: NormedHeads = "head",
        parallel: bool = False,
        centered: bool = False,
    ) -> None:
        super().__init__()
        self.qk_norm_over, self.parallel, self.centered = qk_norm_over, parallel, centered
        self.attention_shortcut, self.mlp_shortcut = attention_shortcut, mlp_shortcut
        self.v_norm, self.reads_keys, self.layer_input = v_norm, reads_keys, layer_input
        self.attention_norm, self.qkv, self.output = attention_norm or nn.Identity(), qkv, output
        self.mlp_norm, self.mlp = mlp_norm or nn.Identity(), mlp
        self.q_norm, self.k_norm = q_norm, k_norm
        self.post_attention_norm, self.post_mlp_norm = post_attention_norm, post_mlp_norm
        self.mixer, self.attention_gate, self.residual_scale = mixer, attention_gate, residual_scale
        self.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)
        self.scale: Float[torch.Tensor, " 1"] | None
        self.register_buffer("scale", scale)

    @property
    def layer_modules(self) -> Self:
        """Itself: its modules have the common names."""
        return self

    def attention_input(self, x: Stream) -> Stream:
        """The stream after the first norm; in the dtype of `qkv` where nothing else reads it."""
        out: torch.Tensor = self.attention_norm(x) if self.mixer else _norm_for(self.attention_norm, x, self.qkv)
        return out

    def finish(self, x: Stream, inputs: Float[torch.Tensor, "*t w"] | None = None) -> Stream:
        """The residual stream after attention and feed-forward with what follows them; `inputs`: the layer's own.

        Raises:
            ValueError: the layer has inputs, and they are missing.
        """
        if self.layer_input is not None:
            if inputs is None:
                raise ValueError("models with per-layer inputs are not supported in this training")
            x = self.layer_input(x, inputs)
        x = centered(x) if self.centered else x
        return x if self.scale is None else (x * self.scale).to(x.dtype)

    def forward(
        self,
        x: Stream,
        sizes: HeadSizes,
        angles: RopeAngles | None,
        layer: int,
        attention: AttentionBackend,
        inputs: Float[torch.Tensor, "*t w"] | None = None,
    ) -> Stream:
        """The residual stream after the block; `inputs`: the layer's own."""
        after = self.add_attention(x, self.attention_input(x), sizes, angles, layer, attention)
        return self.finish(self.add_mlp(after, x)[0], inputs)
