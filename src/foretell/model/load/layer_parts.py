"""Reads the parts of decoder layers that only some families have: shared keys and values, per-layer inputs, norms
without weights, experts beside a dense network.
"""

from collections.abc import Callable

import torch

from foretell.model.block.decoder import FeedForward, RMSNorm
from foretell.model.block.layer_inputs import LayerInput, LayerInputs
from foretell.model.block.linear import Linear
from foretell.model.block.moe import DenseAndExperts, ExpertFeedForward
from foretell.model.config.model import ModelConfig
from foretell.model.load.experts import Weights

Tensor = torch.Tensor
INTERLEAVED = ("llama4_text",)
"""Architectures whose checkpoints store the two halves of a rotary pair side by side."""
LAYER_INPUTS_TABLE = "model.embed_tokens_per_layer.weight"
LAYER_INPUTS_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_INPUTS_NORM = "model.per_layer_projection_norm.weight"


def attention_inputs(config: ModelConfig, i: int, stem: str = "self_attn") -> list[tuple[str, int]]:
    """Names and rows of the projections of a layer's queries, keys and values; queries alone where it reads the keys
    and values of another layer. `stem`: what the names begin with.
    """
    sizes, names = config.sizes_of(i), ["q_proj"]
    if config.kv_layer_of(i) == i:
        names += ["k_proj", "k_proj" if config.values_are_keys and not config.window_of(i) else "v_proj"]
    heads = sizes.heads * (1 + config.attention_gate), sizes.kv_heads, sizes.kv_heads
    return [(f"{stem}.{name}", n * sizes.head_dim) for name, n in zip(names, heads, strict=False)]


def half_split_order(projection: tuple[Tensor, Tensor | None], head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a projection whose rotary pairs lie side by side, in the half-split order."""

    def reorder(part: Tensor) -> Tensor:
        return part.view(-1, head_dim // 2, 2, *part.shape[1:]).transpose(1, 2).reshape(part.shape)

    weight, bias = projection
    return reorder(weight), None if bias is None else reorder(bias)


def unit_norm(config: ModelConfig, i: int, device: torch.device) -> RMSNorm:
    """A norm of the heads of a layer without weights."""
    return RMSNorm(torch.ones(config.sizes_of(i).head_dim, device=device), config.norm_eps)


def layer_scale(config: ModelConfig, prefix: str, weights: Weights) -> float:
    """The number that multiplies the residual stream after the layer whose names begin with `prefix`."""
    return float(weights.require(f"{prefix}layer_scalar", 1)) if config.layer_scales else 1.0


def layer_inputs_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Rows of the table of per-layer inputs, its columns, and how many of these one layer reads."""
    assert config.layer_inputs is not None
    return config.layer_inputs.vocab, config.layers * config.layer_inputs.width, config.layer_inputs.width


def build_layer_inputs(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> LayerInputs:
    """The table and the projection of per-layer inputs.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    vocab, total, width = layer_inputs_sizes(config)
    table = weights.require(LAYER_INPUTS_TABLE, vocab, total).to(device, dtype)
    projection = weights.require(LAYER_INPUTS_PROJECTION, total, config.hidden).to(device, dtype)
    norm = RMSNorm(weights.require(LAYER_INPUTS_NORM, width).to(device), config.norm_eps, config.norm_offset)
    return LayerInputs(table, Linear(projection), norm, width)


def build_layer_input(
    config: ModelConfig, linear: Callable[[str, int, int], Linear], norm: Callable[[str, int], RMSNorm]
) -> LayerInput:
    """What a layer does with its inputs; `linear` and `norm` read its matrices and norms by their names."""
    _, _, width = layer_inputs_sizes(config)
    return LayerInput(
        linear("per_layer_input_gate", width, config.hidden),
        linear("per_layer_projection", config.hidden, width),
        norm("post_per_layer_input_norm", config.hidden),
        config.activation,
    )


def build_beside_dense(
    config: ModelConfig,
    prefix: str,
    weights: Weights,
    dense: FeedForward,
    experts: ExpertFeedForward,
    norm: Callable[[str, int], RMSNorm],
) -> DenseAndExperts:
    """A dense network beside the experts of a layer; their router reads normed inputs over the square root of the
    width.
    """
    scale = weights.require(f"{prefix}router.scale", config.hidden).to(dense.down.weight.device)
    return DenseAndExperts(
        dense,
        norm("post_feedforward_layernorm_1", config.hidden),
        experts,
        norm("pre_feedforward_layernorm_2", config.hidden),
        norm("post_feedforward_layernorm_2", config.hidden),
        RMSNorm(scale.float() * config.hidden**-0.5, config.norm_eps),
    )
