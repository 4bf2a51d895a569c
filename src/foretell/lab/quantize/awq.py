"""AWQ (Lin et al., arXiv 2306.00978): inputs of large activations get larger weights, which round more finely."""

from collections.abc import Mapping

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import InputStatistics, Quantizer, Role, linears, output_error
from foretell.lab.quantize.grid import Grid, QuantizedRows, Weight
from foretell.lab.quantize.rtn import round_to_nearest
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.config.model import ModelConfig

Tensor = torch.Tensor
_EXPONENTS = tuple(i / 20 for i in range(20))
_CLIPS = tuple(1 - i / 20 for i in range(10))
_UNCLIPPED: tuple[Role, ...] = ("qkv",)
"""Clipping queries and keys changes their products too much."""
_LEAST = 1e-4
_CHUNK = 512
"""Outputs whose clipping is searched at once."""


class AWQ(Quantizer):
    """Scales of inputs by a search, folded into the norm or the matrix before, then a search for clipped ranges.

    The searches minimise the squared error of the matrix's own output over the calibration tokens.
    """

    def fold(
        self,
        block: DecoderBlock,
        config: ModelConfig,
        grids: Mapping[Role, Grid],
        inputs: Mapping[Role, InputStatistics],
    ) -> Mapping[Role, InputStatistics]:
        """Fold the scales of all matrices that follow a norm, or a matrix whose outputs can be scaled."""
        matrices, scaled = linears(block), dict(inputs)
        for role, statistics in inputs.items():
            if role == "output" and config.heads != config.kv_heads:
                continue  # Several query heads share a value: no scale fits them all.
            norm = {"qkv": block.attention_norm, "gate_up": block.mlp_norm}.get(role)
            if norm is not None and (config.parallel_blocks or not isinstance(norm, RMSNorm)):
                continue  # Two matrices share a norm, or none precedes them.
            scale = _search(matrices[role].weight, grids[role], statistics)
            matrices[role].weight.data.mul_(scale)
            scaled[role] = statistics.scaled(1 / scale)
            if isinstance(norm, RMSNorm):
                norm.weight.data.div_(scale)
                continue
            before = matrices["qkv" if role == "output" else "gate_up"]
            before.weight.data[-len(scale) :].div_(scale[:, None])  # The last rows: values, or the up projection.
            if before.bias is not None:
                before.bias.data[-len(scale) :].div_(scale)
        return scaled

    def quantize(self, role: Role, weight: Weight, grid: Grid, inputs: InputStatistics | None) -> QuantizedRows:
        """Clip the ranges of groups, then round."""
        assert inputs is not None
        return round_to_nearest(weight if role in _UNCLIPPED else _clip(weight, grid, inputs), grid)


def _search(weight: Float[Tensor, "o i"], grid: Grid, inputs: InputStatistics) -> Float[Tensor, " i"]:
    """The scale `mean_magnitude ** a`, normalised, of least output error; 1 for a = 0."""
    best, chosen = float("inf"), torch.ones_like(inputs.mean_magnitude)
    for exponent in _EXPONENTS:
        scale = inputs.mean_magnitude.clamp(min=_LEAST) ** exponent
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = output_error(round_to_nearest(weight * scale, grid).values() / scale - weight, inputs)
        if error < best:
            best, chosen = error, scale
    return chosen


def _clip(weight: Float[Tensor, "o i"], grid: Grid, inputs: InputStatistics) -> Float[Tensor, "o i"]:
    """The weights within the ranges of least error, chosen for every output and group alone."""
    width = grid.width
    count = weight.shape[1] // width
    moments = torch.stack(
        [inputs.second_moment[i * width : (i + 1) * width, i * width : (i + 1) * width] for i in range(count)]
    )
    clipped = []
    for rows in weight.split(_CHUNK):
        groups = rows.unflatten(1, (count, width))
        extreme = groups.abs().amax(-1, keepdim=True)
        best, chosen = torch.full_like(extreme, float("inf")), extreme
        for share in _CLIPS:
            limit = extreme * share
            tried = groups.clamp(-limit, limit)
            error = round_to_nearest(tried.flatten(1), grid).values().unflatten(1, (count, width)) - groups
            loss = ((error.transpose(0, 1) @ moments).transpose(0, 1) * error).sum(-1, keepdim=True)
            chosen, best = torch.where(loss < best, limit, chosen), torch.minimum(loss, best)
        clipped.append(groups.clamp(-chosen, chosen).flatten(1))
    return torch.cat(clipped)
