"""The decoder of the Llama family in plain torch: Llama, Mistral, Qwen, Gemma, gpt-oss and Mixtral by configuration.

The modules hold weights only; key-value caches are arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.activation import activated
from foretell.model.block.attention import AttentionBackend
from foretell.model.block.attention_kinds import attention_kind, cached_attention, new_store
from foretell.model.block.backend import Backend
from foretell.model.block.cached_attention import CachedAttention, PlacedLayout
from foretell.model.block.layer_inputs import LayerInput, LayerInputs
from foretell.model.block.linear import AnyLinear, Int8Linear, Linear, widen
from foretell.model.block.moe import DenseAndExperts, ExpertFeedForward
from foretell.model.block.rope import RopeAngles, RopeTables, apply_rope, rope_angles, rope_tables
from foretell.model.block.state_layers import StateMixer
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.cache.pages import page_policy
from foretell.model.cache.state_store import StateStore, build_cache
from foretell.model.config.model import Activation, ModelConfig, NormedHeads
from foretell.model.triton import batch_invariant, has_triton, run, runs_kernels
from foretell.utils.transfer import to_device

Stream = Float[torch.Tensor, "*t d"]
"""The residual stream, or what a norm or a sub-layer makes of it."""


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


def _centered(x: Stream) -> Stream:
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
            raise ValueError("layers that share keys and values are not supported in training: only in decoding")
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
        scale: float = 1.0,
        attention_shortcut: Linear | None = None,
        mlp_shortcut: Linear | None = None,
        qk_norm_over: NormedHeads = "head",
        parallel: bool = False,
        centered: bool = False,
    ) -> None:
        super().__init__()
        self.qk_norm_over, self.parallel, self.centered = qk_norm_over, parallel, centered
        self.attention_shortcut, self.mlp_shortcut = attention_shortcut, mlp_shortcut
        self.v_norm, self.reads_keys, self.layer_input, self.scale = v_norm, reads_keys, layer_input, scale
        self.attention_norm, self.qkv, self.output = attention_norm or nn.Identity(), qkv, output
        self.mlp_norm, self.mlp = mlp_norm or nn.Identity(), mlp
        self.q_norm, self.k_norm = q_norm, k_norm
        self.post_attention_norm, self.post_mlp_norm = post_attention_norm, post_mlp_norm
        self.mixer, self.attention_gate, self.residual_scale = mixer, attention_gate, residual_scale
        self.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)

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
                raise ValueError("models with per-layer inputs are not supported in training: only in decoding")
            x = self.layer_input(x, inputs)
        x = _centered(x) if self.centered else x
        return x if self.scale == 1 else x * self.scale

    def forward(
        self, x: Stream, sizes: HeadSizes, angles: RopeAngles | None, layer: int, attention: AttentionBackend
    ) -> Stream:
        """The residual stream after the block."""
        after = self.add_attention(x, self.attention_input(x), sizes, angles, layer, attention)
        return self.finish(self.add_mlp(after, x)[0])


class BlockRange(NamedTuple):
    """Blocks `first .. last-1` of a network, and those of them, ascending, whose input is recorded."""

    first: int
    last: int
    hidden_layers: tuple[int, ...] = ()


class BlockOutput(NamedTuple):
    """Output of a range of blocks."""

    hidden_states: tuple[Float[torch.Tensor, "t d"], ...]
    """The residual stream before every recorded layer, and after the last block."""
    routes: tuple[Int[torch.Tensor, "t k"], ...] = ()
    """Experts of every token in each mixture-of-experts layer."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Number of distinct experts that each mixture-of-experts layer read."""
        return tuple(len(part.unique()) for part in self.routes)


B = TypeVar("B")
BlockForward = Callable[[B, int, Float[torch.Tensor, "t d"]], StreamAndRoutes]
"""`(block, i, x)` to the residual stream after block `i`, and every token's experts (None: dense)."""


def run_blocks(
    x: Float[torch.Tensor, "t d"], blocks: BlockRange, fetch: Callable[[int], B], forward: BlockForward[B]
) -> BlockOutput:
    """Run a range of blocks; `fetch(i)` returns block `i`."""
    states, routes = list[torch.Tensor](), list[Int[torch.Tensor, "t k"]]()
    for i in range(blocks.first, blocks.last):
        if i in blocks.hidden_layers:
            states.append(x)
        x, own = forward(fetch(i), i, x)
        routes += [] if own is None else [own]
    return BlockOutput((*states, x), tuple(routes))


@dataclass(frozen=True)
class SkipSet:
    """Sub-layers that a forward pass skips, by layer index."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


def decoder_rope_tables(config: ModelConfig) -> tuple[RopeTables, RopeTables]:
    """Rotary tables of full-attention layers and of sliding-window layers; one object where these are the same.

    Raises:
        ValueError: the configuration has no rotary positions.
    """
    if config.rope is None:
        raise ValueError(f"{config.architecture}: the decoder needs rotary positions")
    full, local_dim = rope_tables(config.rope, config.head_dim, config.context), config.local_head_dim
    local = config.local_rope
    return full, rope_tables(local, local_dim or config.head_dim, config.context) if local else full


class Decoder(nn.Module):
    """A decoder in torch: embedding, blocks, final norm and head. Implements `Network` on any device."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Float[torch.Tensor, "v d"],
        blocks: list[DecoderBlock],
        norm: RMSNorm,
        head: Linear | Int8Linear | None = None,
        skip: SkipSet = SkipSet(),
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_inputs = config, layer_inputs
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Linear(self.embedding.data) if head is None else head
        self.sparsity = ""
        """How tokens choose their neurons; see `Backend.sparsity`."""
        self.skip = SkipSet(skip.attention.union(config.attention_free_layers), skip.mlp.union(config.mlp_free_layers))
        full, local = decoder_rope_tables(config)
        self.rope_tables = full[0].to(self.device), full[1].to(self.device)
        self.local_rope_tables = local[0].to(self.device), local[1].to(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def backend(self) -> Backend:
        """Torch in the dtype of the weights."""
        precision = "int8" if isinstance(self.head, Int8Linear) else str(self.embedding.dtype).removeprefix("torch.")
        return Backend(
            "torch",
            self.device.type,
            precision,
            batch_invariant=self._batch_invariant,
            cache_dtype=self.config.cache_dtype,
            cache_policy=page_policy(self.config),
            sparsity=self.sparsity,
            attention=self.attention_kind.name,
        )

    @property
    def _batch_invariant(self) -> bool:
        """Whether it consists of kernels that give a token the same bits in every pass."""
        if not (batch_invariant() and has_triton(self.device) and self.attention_kind.name == "triton"):
            return False
        leaves = (module for module in self.modules() if not any(module.children()))
        c, mixers = self.config, any(block.mixer for block in self._block_list())
        return not (c.experts or c.centered or self.layer_inputs or mixers) and all(
            isinstance(leaf, Linear | RMSNorm | nn.Identity) for leaf in leaves
        )

    def first_layers(self, layers: int) -> "Decoder":
        """The first `layers` blocks with the same norm and head, sharing all weights (LayerSkip, arXiv 2404.16710)."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._sharing(self.config.of_layers(range(layers)), self._block_list()[:layers], SkipSet())

    def followed_by(self, layers: int, blocks: Sequence[DecoderBlock]) -> "Decoder":
        """The first `layers` blocks, and after them others of the same sizes."""
        config = replace(self.config.of_layers(range(layers)), layers=layers + len(blocks))
        return self._sharing(config, [*self._block_list()[:layers], *blocks], SkipSet())

    def without_sublayers(self, skip: SkipSet) -> "Decoder":
        """The network without some sub-layers, sharing all weights (Draft & Verify, arXiv 2309.08168)."""
        return self._sharing(self.config, self._block_list(), skip)

    def without_blocks(self, config: ModelConfig, skip: SkipSet) -> "Decoder":
        """The same embedding, norm and head without blocks; see `BlocklessNetwork`."""
        return self._sharing(config, [], skip)

    def _sharing(self, config: ModelConfig, blocks: list[DecoderBlock], skip: SkipSet) -> "Decoder":
        return Decoder(config, self.embedding, blocks, self.norm, self.head, skip, self.layer_inputs)

    def _block_list(self) -> list[DecoderBlock]:
        return [b for b in self.blocks if isinstance(b, DecoderBlock)]

    def new_cache(self) -> Cache:
        """An empty cache for this network."""
        c, dtype, device = self.config, self.embedding.dtype, self.device
        return build_cache(
            c,
            lambda layers, s: new_store(c, layers, s, dtype, device),
            lambda layers, shape: StateStore(layers, shape, torch.promote_types(dtype, torch.float32), device),
        )

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32 or wider: the residual stream is not rounded to the weights' dtype."""
        x = widen(F.embedding(to_device(token, self.device), self.embedding))
        scale = self.config.embedding_scale
        x = _centered(x) if self.config.centered else x
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks; new keys and values are written to `cache`."""
        return run_blocks(x, blocks, self.block, self.block_forward(layout, cache))

    def block(self, i: int) -> DecoderBlock:
        """Block `i`."""
        block = self.blocks[i]
        assert isinstance(block, DecoderBlock)
        return block

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values of blocks whose input is `x`, all of them; see `Network.write_keys`."""
        c, attention = self.config, cached_attention(cache, layout, self.config, self.device)
        full = rope_angles(self.rope_tables, attention.position)
        local = rope_angles(self.local_rope_tables, attention.position) if c.window_layers else full
        for i in range(blocks.first, blocks.last):
            if i not in self.skip.attention:
                block = self.block(i)
                angles = None if i in c.unrotated_layers else local if c.window_of(i) else full
                _, k, v = block.project(block.attention_norm(x), c.sizes_of(i), angles)
                attention.write(i, k, v)

    @property
    def attention_kind(self) -> type[CachedAttention]:
        """What attends to the cache of its passes."""
        return attention_kind(self.config, self.embedding.dtype, self.device)

    def run_placed(
        self, x: Float[torch.Tensor, "t d"], placed: PlacedLayout, cache: Cache, blocks: BlockRange
    ) -> BlockOutput:
        """Run a range of blocks; all shapes depend on the shapes of the arguments alone, as CUDA graphs need."""
        attention = self.attention_kind(cache, placed, self.config)
        return run_blocks(x, blocks, self.block, self._block_forward(attention))

    def block_forward(self, layout: Layout, cache: Cache) -> BlockForward[DecoderBlock]:
        """The forward pass of a block over this layout and cache."""
        return self._block_forward(cached_attention(cache, layout, self.config, self.device))

    def _block_forward(self, attention: CachedAttention) -> BlockForward[DecoderBlock]:
        c = self.config
        full = rope_angles(self.rope_tables, attention.position)
        local = rope_angles(self.local_rope_tables, attention.position) if c.window_layers else full
        inputs = None
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(attention.token, self.embed(attention.token))

        def forward(block: DecoderBlock, i: int, x: Float[torch.Tensor, "t d"]) -> StreamAndRoutes:
            before = x
            if i not in self.skip.attention:
                angles = None if i in c.unrotated_layers else local if c.window_of(i) else full
                x = block.add_attention(x, block.attention_input(x), c.sizes_of(i), angles, i, attention)
            else:
                x = block.shortcut_attention(x)
            x, experts = (block.shortcut_mlp(x), None) if i in self.skip.mlp else block.add_mlp(x, before)
            return block.finish(x, None if inputs is None else inputs[:, i]), experts

        return forward

    def final_norm(self, x: Stream) -> Stream:
        """The final norm, from the last block's output to the input of the head."""
        return self.norm(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Logits of the next token in float32 or wider, from the output of `final_norm`."""
        return self.bound_logits(widen(self.head(x)))

    def bound_logits(self, out: Float[torch.Tensor, "k v"]) -> Float[torch.Tensor, "k v"]:
        """Logits from the output of the head: with the architecture's factor and bound."""
        if self.config.logit_scale != 1:
            out = out * self.config.logit_scale
        cap = self.config.logit_softcap
        return torch.tanh(out / cap) * cap if cap else out
