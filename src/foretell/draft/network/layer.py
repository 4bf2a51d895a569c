"""A decoder layer that leaves to others what its queries see, so that training and drafting run the same code."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn

from foretell.model.linear import widen
from foretell.model.strips import Pair, causal_attention

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every token's rotary angles, `[*t, 1, half]` each."""


@dataclass(frozen=True)
class Sizes:
    """Of a layer: width, heads, and what its feed-forward is wide."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed head by head, as Qwen 3 does."""


class Sight(ABC):
    """What the queries of one call may see: keys and values of their past, and those of the call itself."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "*t h e"],
        k: Float[torch.Tensor, "*t g e"],
        v: Float[torch.Tensor, "*t g e"],
    ) -> Float[torch.Tensor, "*t he"]:
        """Softmax attention in a layer; remembers the new keys and values for later calls."""


class Norm(nn.Module):
    """Root-mean-square norm with a trained scale (arXiv 1910.07467), in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Normalise and scale."""
        wide = widen(x)
        return F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Rotary attention with grouped heads; `qkv_proj` holds all query heads' rows, then all keys', then all values'."""

    def __init__(self, sizes: Sizes, inputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.qkv_proj = nn.Linear(inputs, rows, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.q_norm = Norm(sizes.head_dim, sizes.norm_eps) if sizes.qk_norm else None
        self.k_norm = Norm(sizes.head_dim, sizes.norm_eps) if sizes.qk_norm else None

    def forward(
        self, x: Float[torch.Tensor, "*t i"], turn: Turn, layer: int, sight: Sight
    ) -> Float[torch.Tensor, "*t d"]:
        """What the tokens take from those that they see."""
        s = self.sizes
        heads = self.qkv_proj(x).unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_dim))
        asked, v = heads[..., : s.heads + s.kv_heads, :], heads[..., s.heads + s.kv_heads :, :]
        if self.q_norm is not None and self.k_norm is not None:
            asked = torch.cat((self.q_norm(asked[..., : s.heads, :]), self.k_norm(asked[..., s.heads :, :])), -2)
        turned = rotate(asked, turn)
        out: torch.Tensor = self.o_proj(sight.attend(layer, turned[..., : s.heads, :], turned[..., s.heads :, :], v))
        return out


def rotate(x: Float[torch.Tensor, "*t h e"], turn: Turn) -> Float[torch.Tensor, "*t h e"]:
    """Turn every head to its token's position, in the half-split layout."""
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class FeedForward(nn.Module):
    """Down(SiLU(gate x) * up x); `gate_up_proj` holds the gate's rows, then the up projection's."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down_proj = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Apply to the last axis."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Layer(nn.Module):
    """A layer of the Llama family. EAGLE-1's first layer has no norm before its attention (`normed` False)."""

    def __init__(self, sizes: Sizes, normed: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes.hidden, sizes.norm_eps) if normed else None
        self.self_attn = Attention(sizes, sizes.hidden)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.norm_eps)
        self.mlp = FeedForward(sizes)

    def forward(
        self, x: Float[torch.Tensor, "*t d"], turn: Turn, layer: int, sight: Sight
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after the layer."""
        return self.after(x, x if self.input_layernorm is None else self.input_layernorm(x), turn, layer, sight)

    def after(
        self, x: Float[torch.Tensor, "*t d"], seen: Float[torch.Tensor, "*t i"], turn: Turn, layer: int, sight: Sight
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after the layer, whose attention sees `seen`."""
        x = x + self.self_attn(seen, turn, layer, sight)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class FusingLayer(Layer):
    """EAGLE-3's layer: attention over the token's embedding and the feature side by side, the feature as residual stream."""

    input_layernorm: Norm

    def __init__(self, sizes: Sizes, norm_before_residual: bool) -> None:
        super().__init__(sizes)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = Norm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Attention(sizes, 2 * sizes.hidden)

    def enter(
        self, embedded: Float[torch.Tensor, "*t d"], g: Float[torch.Tensor, "*t d"]
    ) -> tuple[Float[torch.Tensor, "*t d"], Float[torch.Tensor, "*t dd"]]:
        """The residual stream, and what attention sees."""
        normed = self.hidden_norm(g)
        return normed if self.norm_before_residual else g, torch.cat((self.input_layernorm(embedded), normed), -1)


class Unrolled(Sight):
    """Attention of training-time test (EAGLE-3, arXiv 2503.01840) over whole texts `[b, s]`, one call per layer and step.

    In step `i` position `j` sees what drafting would: keys of step 0 up to `j` (the text, read with true features), then its own keys of steps
    `1 .. i` (what it drafted since). Padding stands at the end. Later steps may leave out positions at the beginning.
    """

    def __init__(self) -> None:
        self._past: dict[int, list[Pair]] = {}

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "b s h e"],
        k: Float[torch.Tensor, "b s g e"],
        v: Float[torch.Tensor, "b s g e"],
    ) -> Float[torch.Tensor, "b s he"]:
        """Causal in step 0, and along the diagonal from then on."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        past = self._past.setdefault(layer, [])
        past.append((k, v))
        n = q.shape[2]
        own = [(key[:, :, -n:], value[:, :, -n:]) for key, value in past[1:]]
        out = causal_attention(q, *past[0], q.shape[-1] ** -0.5, own)
        return out.transpose(1, 2).flatten(2)
