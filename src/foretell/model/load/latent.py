"""Reads the projections of multi-head latent attention (DeepSeek and GLM)."""

from collections.abc import Callable

import torch
from torch import nn

from foretell.model.block.decoder import RMSNorm
from foretell.model.block.latent import LatentProjection
from foretell.model.block.linear import Linear
from foretell.model.config.model import ModelConfig
from foretell.model.load.experts import Weights

Tensor = torch.Tensor
_LATENT_EPS = 1e-6
"""Of the norms within latent attention, whatever the configuration says (as in transformers)."""


def read_latent_projection(
    config: ModelConfig, prefix: str, weights: Weights, place: Callable[[Tensor], Tensor]
) -> LatentProjection:
    """The projection of the layer whose names begin with `prefix`, its tensors placed by `place`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    c, sizes, heads = config, config.latent, config.heads
    assert sizes is not None
    width, name = sizes.nope_dim + sizes.rope_dim, f"{prefix}self_attn."
    order = torch.arange(sizes.rope_dim)
    if sizes.interleaved_rope:  # to the half-split order
        order = order.view(-1, 2).T.flatten()

    def rotated_last(matrix: Tensor, before: int) -> Tensor:
        """Rows in blocks of `before` and the rotary ones, these in the half-split order."""
        blocks = matrix.view(-1, before + sizes.rope_dim, matrix.shape[1])
        return torch.cat((blocks[:, :before], blocks[:, before:][:, order]), 1).flatten(0, 1)

    def linear(stem: str, outputs: int, inputs: int, before: int | None = None) -> Linear:
        matrix = weights.require(f"{name}{stem}.weight", outputs, inputs)
        return Linear(place(matrix if before is None else rotated_last(matrix, before)))

    def norm(stem: str, rank: int) -> RMSNorm:
        weight = weights.require(f"{name}{stem}.weight", rank)
        return RMSNorm(weight.to(place(weight).device), _LATENT_EPS)

    query: nn.Module
    if sizes.q_rank:
        query = nn.Sequential(
            linear("q_a_proj", sizes.q_rank, c.hidden),
            norm("q_a_layernorm", sizes.q_rank),
            linear("q_b_proj", heads * width, sizes.q_rank, sizes.nope_dim),
        )
    else:
        query = linear("q_proj", heads * width, c.hidden, sizes.nope_dim)
    compress = linear("kv_a_proj_with_mqa", sizes.kv_rank + sizes.rope_dim, c.hidden, sizes.kv_rank)
    expand = weights.require(f"{name}kv_b_proj.weight", heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank)
    key, value = expand.view(heads, -1, sizes.kv_rank).split((sizes.nope_dim, sizes.value_dim), 1)
    return LatentProjection(
        sizes,
        query,
        compress,
        norm("kv_a_layernorm", sizes.kv_rank),
        place(key.contiguous()),
        place(value.contiguous()),
    )
