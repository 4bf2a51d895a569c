"""The decoder layer of EAGLE speculators, and its attention during training."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import nn

from foretell.model.block.attention import AttentionBackend, HeadScores, Keys, Merged, Queries
from foretell.model.block.layer import DecoderLayer, LayerModules, RMSNorm, Stream, gated_mlp
from foretell.model.block.rope import RopeAngles
from foretell.model.block.weights import places_of
from foretell.model.config.model import ModelConfig
from foretell.model.training.chunked_attention import KeyValue, causal_attention


def no_window(layer: int) -> int:
    """The window of a layer without one."""
    return 0


def make_norm(width: int, eps: float) -> RMSNorm:
    """A trainable RMS norm of ones."""
    return RMSNorm(torch.ones(width), eps).requires_grad_(True)


class Attention(nn.Module):
    """Weights of grouped-query attention; the rows of `qkv_proj` are those of the queries, the keys, the values."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.config = config
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(inputs, rows, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        own = [place for place in places_of(config, 0) if place.rows is None and ".self_attn." in place.name]
        self._vectors = [place.path for place in own]
        for place in own:
            if place.path.endswith("_norm"):
                self.add_module(place.path, make_norm(place.shape[0], config.norm_eps))
            else:
                self.register_parameter(place.path, nn.Parameter(torch.zeros(place.shape)))

    @property
    def vectors(self) -> dict[str, Any]:
        """Its norms and vectors, by their fields in the record of a block."""
        return {name: getattr(self, name) for name in self._vectors}


class FeedForward(nn.Module):
    """Down(SiLU(gate x) * up x); `gate_up_proj` holds the gate's rows, then the up projection's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Stream) -> Stream:
        """Apply to the last axis."""
        return gated_mlp(x, self.gate_up_proj, self.down_proj, "silu")


class EagleLayer(DecoderLayer):
    """A decoder layer of the Llama family with the tensor names of published checkpoints.

    `input_norm`: whether a norm precedes the attention; the first layer of EAGLE-1 has none.
    """

    def __init__(self, config: ModelConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config.hidden, config.norm_eps) if input_norm else None
        self.self_attn = Attention(config, config.hidden)
        self.post_attention_layernorm = make_norm(config.hidden, config.norm_eps)
        self.mlp = FeedForward(config)

    @property
    def layer_modules(self) -> LayerModules:
        """Its modules."""
        a = self.self_attn
        return LayerModules(a.qkv_proj, a.o_proj, self.post_attention_layernorm, self.mlp, **a.vectors)

    def forward(self, x: Stream, angles: RopeAngles, layer: int, attention: AttentionBackend) -> Stream:
        """The residual stream after the layer."""
        return self.forward_from_input(
            x, x if self.input_layernorm is None else self.input_layernorm(x), angles, layer, attention
        )

    def forward_from_input(
        self,
        x: Stream,
        attention_input: Float[torch.Tensor, "*t i"],
        angles: RopeAngles,
        layer: int,
        attention: AttentionBackend,
    ) -> Stream:
        """The residual stream after the layer, with this input of the attention."""
        return self.add_mlp(self.add_attention(x, attention_input, self.self_attn.config, angles, layer, attention))[0]


class Eagle3FirstLayer(EagleLayer):
    """EAGLE-3's first layer: attention over the concatenation of token embedding and feature; the feature is the
    residual stream.
    """

    input_layernorm: RMSNorm

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__(config)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = make_norm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden)

    def prepare_inputs(self, embedded: Stream, feature: Stream) -> tuple[Stream, Float[torch.Tensor, "*t dd"]]:
        """The residual stream, and the input of the attention."""
        normed = self.hidden_norm(feature)
        return normed if self.norm_before_residual else feature, torch.cat((self.input_layernorm(embedded), normed), -1)


class TrainingTimeTestAttention(AttentionBackend):
    """Attention of training-time test (EAGLE-3, arXiv 2503.01840) over sequences `[b, s]`, one call per layer and step.

    In step `i` position `j` attends to what it would attend to when drafting: keys of step 0 up to `j` (made from the
    target's features), then its own keys of steps `1 .. i` (made from its own outputs). Padding is at the end. Later
    steps may leave out positions at the beginning. `window_of`: the sliding window of a layer, which counts these
    positions; 0: none.
    """

    def __init__(self, window_of: Callable[[int], int] = no_window) -> None:
        self._window_of = window_of
        self._past: dict[int, list[KeyValue]] = {}
        """Keys and values of every step so far, per layer."""

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Causal attention in step 0; later steps add their own diagonal."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        past = self._past.setdefault(layer, [])
        past.append((k, v))
        n = q.shape[2]
        own = [(key[:, :, -n:], value[:, :, -n:]) for key, value in past[1:]]
        out = causal_attention(q, *past[0], q.shape[-1] ** -0.5, own, self._window_of(layer), extra)
        return out.transpose(1, 2).flatten(2)
