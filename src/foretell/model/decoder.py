"""The decoder of the Llama family in plain torch: Llama, Mistral, Qwen, Gemma, Mixtral by configuration.

Weights only; caches are arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.attention import Cached, PaddedLayout, Sight
from foretell.model.backend import Backend
from foretell.model.cache import KVCache, Layout
from foretell.model.config import Activation, ModelConfig
from foretell.model.linear import Int8Linear, Linear, widen
from foretell.model.moe import ExpertFeedForward
from foretell.model.rope import Rotation, Tables, rotate, rotation, tables


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich, arXiv 1910.07467) over the last axis, computed in float32 or wider."""

    def __init__(self, weight: Float[torch.Tensor, " d"], eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float() + offset, requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Normalise and scale."""
        wide = widen(x)
        return F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """Gated feed-forward; `gate_up` holds the gate's rows, then the up projection's."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Down(activation(gate x) * up x)."""
        return gated(x, self.gate_up, self.down, self.activation)


def gated(
    x: Float[torch.Tensor, "*t d"], gate_up: nn.Module, down: nn.Module, activation: Activation
) -> Float[torch.Tensor, "*t d"]:
    """Gated feed-forward (Shazeer, arXiv 2002.05202): down(activation(gate x) * up x)."""
    gate, up = gate_up(x).chunk(2, -1)
    out: torch.Tensor = down(_activate(gate, activation) * up)
    return out


def _activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


class HeadSizes(Protocol):
    """How the rows of `qkv` are divided into heads."""

    @property
    def heads(self) -> int: ...  # noqa: D102
    @property
    def kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


class Parts(NamedTuple):
    """The modules of a decoder layer, whatever a checkpoint calls them. None: the architecture has no such norm."""

    qkv: nn.Module
    output: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    post_attention_norm: nn.Module | None = None
    post_mlp_norm: nn.Module | None = None


class DecoderLayer(nn.Module, ABC):
    """The forward pass of one decoder layer.

    A `Sight` computes the attention, so that decoding and training run the same code.
    """

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """Its modules."""

    def project(
        self, seen: Float[torch.Tensor, "*t i"], sizes: HeadSizes, angles: Rotation
    ) -> tuple[Float[torch.Tensor, "*t h e"], Float[torch.Tensor, "*t g e"], Float[torch.Tensor, "*t g e"]]:
        """Rotated queries, rotated keys, and values of the attention's input."""
        p, h, g = self.parts, sizes.heads, sizes.kv_heads
        heads = p.qkv(seen).unflatten(-1, (h + 2 * g, sizes.head_dim))
        asked, v = heads[..., : h + g, :], heads[..., h + g :, :]
        if p.q_norm is not None and p.k_norm is not None:
            asked = torch.cat((p.q_norm(asked[..., :h, :]), p.k_norm(asked[..., h:, :])), -2)
        asked = rotate(asked, angles)
        return asked[..., :h, :], asked[..., h:, :], v

    def add_attention(
        self,
        x: Float[torch.Tensor, "*t d"],
        seen: Float[torch.Tensor, "*t i"],
        sizes: HeadSizes,
        angles: Rotation,
        layer: int,
        sight: Sight,
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after the attention, whose input is `seen`. `layer` is the layer's number for `sight`."""
        p = self.parts
        part: torch.Tensor = p.output(sight.attend(layer, *self.project(seen, sizes, angles)))
        return x + (part if p.post_attention_norm is None else p.post_attention_norm(part))

    def add_mlp(self, x: Float[torch.Tensor, "*t d"]) -> tuple[Float[torch.Tensor, "*t d"], int]:
        """The residual stream after the feed-forward, and how many distinct experts it read (0: it has none)."""
        p, experts = self.parts, 0
        part: torch.Tensor = p.mlp_norm(x)
        if isinstance(p.mlp, ExpertFeedForward):
            flat, experts = p.mlp.visit(part.flatten(0, -2))
            part = flat.view_as(x)
        else:
            part = p.mlp(part)
        return x + (part if p.post_mlp_norm is None else p.post_mlp_norm(part)), experts


class DecoderBlock(DecoderLayer):
    """One decoder block. `qkv` holds all query heads' rows, then all key heads', then all value heads'."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        qkv: Linear,
        output: Linear,
        mlp_norm: RMSNorm,
        mlp: FeedForward | ExpertFeedForward,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        post_attention_norm: RMSNorm | None = None,
        post_mlp_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.qkv, self.output = attention_norm, qkv, output
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.q_norm, self.k_norm = q_norm, k_norm
        self.post_attention_norm, self.post_mlp_norm = post_attention_norm, post_mlp_norm

    @property
    def parts(self) -> Parts:
        """Its modules."""
        norms = self.q_norm, self.k_norm, self.post_attention_norm, self.post_mlp_norm
        return Parts(self.qkv, self.output, self.mlp_norm, self.mlp, *norms)

    def forward(
        self, x: Float[torch.Tensor, "*t d"], sizes: HeadSizes, angles: Rotation, layer: int, sight: Sight
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after the block."""
        return self.add_mlp(self.add_attention(x, self.attention_norm(x), sizes, angles, layer, sight))[0]


class Span(NamedTuple):
    """Blocks `first .. last-1` of a network, and those of them, ascending, before which the residual stream is looked
    at.
    """

    first: int
    last: int
    hidden_layers: tuple[int, ...] = ()


class Streams(NamedTuple):
    """What the blocks of a span computed."""

    states: tuple[Float[torch.Tensor, "t d"], ...]
    """The residual stream at every recorded layer, and after the last block."""
    experts: tuple[int, ...] = ()
    """Distinct experts that each mixture layer read."""


B = TypeVar("B")
Through = Callable[[B, int, Float[torch.Tensor, "t d"]], tuple[Float[torch.Tensor, "t d"], int]]
"""Takes the residual stream through a block, the `i`-th, and says how many distinct experts that read (0: it has
none).
"""


def visit(x: Float[torch.Tensor, "t d"], span: Span, fetch: Callable[[int], B], through: Through[B]) -> Streams:
    """The blocks of a span one by one, from where `fetch` has them."""
    seen, experts = list[torch.Tensor](), list[int]()
    for i in range(span.first, span.last):
        if i in span.hidden_layers:
            seen.append(x)
        x, count = through(fetch(i), i, x)
        experts += [count] if count else []
    return Streams((*seen, x), tuple(experts))


@dataclass(frozen=True)
class Skip:
    """Sub-layers that a pass leaves out: the residual stream goes past them unchanged."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


class Decoder(nn.Module):
    """A whole network: embedding, blocks, final norm and head. Implements `Network` on any device."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Float[torch.Tensor, "v d"],
        blocks: list[DecoderBlock],
        norm: RMSNorm,
        head: Linear | Int8Linear | None = None,
        skip: Skip = Skip(),
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Linear(self.embedding.data) if head is None else head
        self.skip = skip
        self.rope = self._tables(local=False)
        self.local_rope = self._tables(local=True)

    def _tables(self, local: bool) -> Tables:
        rope = self.config.local_rope if local and self.config.local_rope else self.config.rope
        if rope is None:
            raise ValueError(f"{self.config.architecture}: the decoder needs rotary positions")
        cos, sin = tables(rope, self.config.head_dim, self.config.context)
        return cos.to(self.device), sin.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def backend(self) -> Backend:
        """Torch in the dtype of the weights."""
        precision = "int8" if isinstance(self.head, Int8Linear) else str(self.embedding.dtype).removeprefix("torch.")
        return Backend("torch", self.device.type, precision)

    def cut(self, layers: int) -> "Decoder":
        """The first `layers` blocks under the same norm and head, sharing all weights (LayerSkip's draft, arXiv
        2404.16710).
        """
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return Decoder(replace(self.config, layers=layers), self.embedding, self._each()[:layers], self.norm, self.head)

    def skipping(self, skip: Skip) -> "Decoder":
        """The same weights without some sub-layers (Draft & Verify, arXiv 2309.08168)."""
        return Decoder(self.config, self.embedding, self._each(), self.norm, self.head, skip)

    def shell(self, config: ModelConfig, skip: Skip) -> "Decoder":
        """The same embedding, norm and head without blocks, for blocks that are kept elsewhere."""
        return Decoder(config, self.embedding, [], self.norm, self.head, skip)

    def _each(self) -> list[DecoderBlock]:
        return [b for b in self.blocks if isinstance(b, DecoderBlock)]

    def new_cache(self) -> KVCache:
        """An empty cache for this network."""
        c = self.config
        return KVCache(c.layers, c.kv_heads, c.head_dim, self.embedding.dtype, self.device)

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32 or wider: the residual stream is not rounded to the dtype of the
        weights.
        """
        x = widen(F.embedding(token.to(self.device), self.embedding))
        scale = self.config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: KVCache, span: Span) -> Streams:
        """The blocks of a span, writing the new keys and values into `cache`."""
        return self.planned(x, PaddedLayout.of(layout, x.device), cache, span, self.block)

    def block(self, i: int) -> DecoderBlock:
        """The `i`-th block."""
        block = self.blocks[i]
        assert isinstance(block, DecoderBlock)
        return block

    def planned(
        self,
        x: Float[torch.Tensor, "t d"],
        plan: PaddedLayout,
        cache: KVCache,
        span: Span,
        fetch: Callable[[int], DecoderBlock],
    ) -> Streams:
        """The blocks of a span, from where `fetch` has them.

        On device tensors only: shapes depend on the plan's shapes alone, so that a pass can be captured.
        """
        return visit(x, span, fetch, self._over(plan, cache))

    def over(self, layout: Layout, cache: KVCache) -> Through[DecoderBlock]:
        """What takes the residual stream of a pass through a block."""
        return self._over(PaddedLayout.of(layout, self.device), cache)

    def _over(self, plan: PaddedLayout, cache: KVCache) -> Through[DecoderBlock]:
        c, sight = self.config, Cached(cache, plan, self.config)
        full = rotation(self.rope, plan.position)
        local = rotation(self.local_rope, plan.position) if c.window_layers else full

        def through(
            block: DecoderBlock, i: int, x: Float[torch.Tensor, "t d"]
        ) -> tuple[Float[torch.Tensor, "t d"], int]:
            if i not in self.skip.attention:
                x = block.add_attention(x, block.attention_norm(x), c, local if c.window_of(i) else full, i, sight)
            return (x, 0) if i in self.skip.mlp else block.add_mlp(x)

        return through

    def final(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """What the head sees: the last block's output after the final norm."""
        return self.norm(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Scores of the next token in float32 or wider, from what `final` gave."""
        out = widen(self.head(x))
        cap = self.config.logit_softcap
        return torch.tanh(out / cap) * cap if cap else out
