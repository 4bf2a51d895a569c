"""The decoder of the Llama family in plain torch: Llama, Mistral, Qwen, Gemma, Mixtral by configuration. Weights only; caches are arguments."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.attention import Plan, attend
from foretell.model.cache import Cache, Layout
from foretell.model.config import Activation, ModelConfig
from foretell.model.linear import Linear, widen
from foretell.model.moe import ExpertFeedForward
from foretell.model.rope import Tables, rotate, tables


class Norm(nn.Module):
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

    def forward(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """Down(activation(gate x) * up x)."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(_activate(gate, self.activation) * up)


def _activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


class Block(nn.Module):
    """One decoder block. `qkv` holds all query heads' rows, then all key heads', then all value heads'."""

    def __init__(
        self,
        attention_norm: Norm,
        qkv: Linear,
        output: Linear,
        mlp_norm: Norm,
        mlp: FeedForward | ExpertFeedForward,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        post_attention_norm: Norm | None = None,
        post_mlp_norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.qkv, self.output = attention_norm, qkv, output
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.q_norm, self.k_norm = q_norm, k_norm
        self.post_attention_norm, self.post_mlp_norm = post_attention_norm, post_mlp_norm


def _feed_forward(block: Block, x: torch.Tensor, cache: Cache) -> torch.Tensor:
    out: torch.Tensor
    if isinstance(block.mlp, FeedForward):
        out = block.mlp.forward(x)
    else:
        out, experts = block.mlp.visit(x)
        cache.experts_read.append(experts)
    return out


class Span(NamedTuple):
    """Blocks `first .. last-1` of a network, and those of them, ascending, before which the residual stream is looked at."""

    first: int
    last: int
    taps: tuple[int, ...] = ()


Streams = tuple[Float[torch.Tensor, "t d"], ...]
"""The residual stream at every tap of a span, and after its last block."""


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
        blocks: list[Block],
        norm: Norm,
        head: Linear | None = None,
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

    def cut(self, layers: int) -> "Decoder":
        """The first `layers` blocks under the same norm and head, sharing all weights (LayerSkip's draft, arXiv 2404.16710)."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return Decoder(replace(self.config, layers=layers), self.embedding, self._each()[:layers], self.norm, self.head)

    def skipping(self, skip: Skip) -> "Decoder":
        """The same weights without some sub-layers (Draft & Verify, arXiv 2309.08168)."""
        return Decoder(self.config, self.embedding, self._each(), self.norm, self.head, skip)

    def _each(self) -> list[Block]:
        return [b for b in self.blocks if isinstance(b, Block)]

    def new_cache(self) -> Cache:
        """An empty cache for this network."""
        c = self.config
        return Cache(c.layers, c.kv_heads, c.head_dim, self.embedding.dtype, self.device)

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block."""
        x = F.embedding(token.to(self.device), self.embedding)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, span: Span) -> Streams:
        """The blocks of a span, writing the new keys and values into `cache`."""
        return self.planned(x, Plan.of(layout, x.device), cache, span, self.block)

    def block(self, i: int) -> Block:
        """The `i`-th block."""
        block = self.blocks[i]
        assert isinstance(block, Block)
        return block

    def planned(
        self,
        x: Float[torch.Tensor, "t d"],
        plan: Plan,
        cache: Cache,
        span: Span,
        fetch: Callable[[int], Block],
    ) -> Streams:
        """The blocks of a span, from where `fetch` has them.

        On device tensors only: shapes depend on the plan's shapes alone, so that a pass can be captured.
        """
        seen = list[torch.Tensor]()
        for i in range(span.first, span.last):
            if i in span.taps:
                seen.append(x)
            x = self._through(fetch(i), i, x, plan, cache)
        return (*seen, x)

    def _through(
        self, block: Block, i: int, x: Float[torch.Tensor, "t d"], plan: Plan, cache: Cache
    ) -> Float[torch.Tensor, "t d"]:
        """One block as the `i`-th."""
        if i not in self.skip.attention:
            part = self._attention(block, i, block.attention_norm(x), cache, plan)
            x = x + (part if block.post_attention_norm is None else block.post_attention_norm(part))
        if i not in self.skip.mlp:
            part = _feed_forward(block, block.mlp_norm(x), cache)
            x = x + (part if block.post_mlp_norm is None else block.post_mlp_norm(part))
        return x

    def _attention(self, block: Block, i: int, x: torch.Tensor, cache: Cache, plan: Plan) -> torch.Tensor:
        c = self.config
        heads = block.qkv(x).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), 1)
        q = q if block.q_norm is None else block.q_norm(q)
        k = k if block.k_norm is None else block.k_norm(k)
        window = c.window_of(i)
        table = self.local_rope if window else self.rope
        cache.write(i, plan.row, plan.slot, rotate(k, plan.position, table), v)
        q = rotate(q, plan.position, table)
        out: torch.Tensor = block.output(attend(q, i, cache, plan, window, c.scale, c.attention_softcap))
        return out

    def final(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """What the head sees: the last block's output after the final norm."""
        return self.norm(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Scores of the next token in float32 or wider, from what `final` gave."""
        out = widen(self.head(x))
        cap = self.config.logit_softcap
        return torch.tanh(out / cap) * cap if cap else out
