"""The decoder layer of EAGLE speculators, and its attention in training."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.attention import Sight
from foretell.model.decoder import DecoderLayer, Parts, RMSNorm, gated
from foretell.model.rope import Rotation
from foretell.model.training.chunked_attention import Pair, causal_attention


@dataclass(frozen=True)
class EagleLayerConfig:
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


def make_norm(width: int, eps: float) -> RMSNorm:
    """A root-mean-square norm with a scale that is trained."""
    return RMSNorm(torch.ones(width), eps).requires_grad_(True)


class Attention(nn.Module):
    """Rotary attention with grouped heads; `qkv_proj` holds all query heads' rows, then all keys', then all values'."""

    def __init__(self, sizes: EagleLayerConfig, inputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.qkv_proj = nn.Linear(inputs, rows, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.q_norm = make_norm(sizes.head_dim, sizes.norm_eps) if sizes.qk_norm else None
        self.k_norm = make_norm(sizes.head_dim, sizes.norm_eps) if sizes.qk_norm else None


class FeedForward(nn.Module):
    """Down(SiLU(gate x) * up x); `gate_up_proj` holds the gate's rows, then the up projection's."""

    def __init__(self, sizes: EagleLayerConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.down_proj = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Apply to the last axis."""
        return gated(x, self.gate_up_proj, self.down_proj, "silu")


class EagleLayer(DecoderLayer):
    """A layer of the Llama family under the names of published checkpoints.

    EAGLE-1 has no norm before its first attention (`normed` False).
    """

    def __init__(self, sizes: EagleLayerConfig, normed: bool = True) -> None:
        super().__init__()
        self.input_layernorm = make_norm(sizes.hidden, sizes.norm_eps) if normed else None
        self.self_attn = Attention(sizes, sizes.hidden)
        self.post_attention_layernorm = make_norm(sizes.hidden, sizes.norm_eps)
        self.mlp = FeedForward(sizes)

    @property
    def parts(self) -> Parts:
        """Its modules."""
        a = self.self_attn
        return Parts(a.qkv_proj, a.o_proj, self.post_attention_layernorm, self.mlp, a.q_norm, a.k_norm)

    def forward(
        self, x: Float[torch.Tensor, "*t d"], angles: Rotation, layer: int, sight: Sight
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after the layer."""
        return self.forward_from_input(
            x, x if self.input_layernorm is None else self.input_layernorm(x), angles, layer, sight
        )

    def forward_from_input(
        self,
        x: Float[torch.Tensor, "*t d"],
        seen: Float[torch.Tensor, "*t i"],
        angles: Rotation,
        layer: int,
        sight: Sight,
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after the layer, whose attention sees `seen`."""
        return self.add_mlp(self.add_attention(x, seen, self.self_attn.sizes, angles, layer, sight))[0]


class Eagle3FirstLayer(EagleLayer):
    """EAGLE-3's layer: attention over the token's embedding and the feature side by side, the feature as residual
    stream.
    """

    input_layernorm: RMSNorm

    def __init__(self, sizes: EagleLayerConfig, norm_before_residual: bool) -> None:
        super().__init__(sizes)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = make_norm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Attention(sizes, 2 * sizes.hidden)

    def prepare_inputs(
        self, embedded: Float[torch.Tensor, "*t d"], g: Float[torch.Tensor, "*t d"]
    ) -> tuple[Float[torch.Tensor, "*t d"], Float[torch.Tensor, "*t dd"]]:
        """The residual stream, and what attention sees."""
        normed = self.hidden_norm(g)
        return normed if self.norm_before_residual else g, torch.cat((self.input_layernorm(embedded), normed), -1)


class TrainingTimeTestAttention(Sight):
    """Attention of training-time test (EAGLE-3, arXiv 2503.01840) over whole texts `[b, s]`, one call per layer and
    step.

    In step `i` position `j` sees what drafting would: keys of step 0 up to `j` (the text, read with true features),
    then its own keys of steps `1 .. i` (what it drafted since). Padding stands at the end. Later steps may leave out
    positions at the beginning.
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
