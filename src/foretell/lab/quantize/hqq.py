"""HQQ (half-quadratic quantisation, Badri and Shaji 2023): robust offsets or scales, without data."""

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import InputStatistics, Quantizer, Role
from foretell.lab.quantize.grid import Grid, QuantizedRows, Weight

Tensor = torch.Tensor
_STEPS, _NORM, _BETA, _GROWTH = 20, 0.7, 10.0, 1.01


class HQQ(Quantizer):
    """Minimises the sum of |error| ** 0.7 by splitting it into a shrinkage and a least-squares step.

    A type with offsets keeps the scales and moves the offsets, as published; a type without moves the scales.
    """

    calibrated = False

    def quantize(self, role: Role, weight: Weight, grid: Grid, inputs: InputStatistics | None) -> QuantizedRows:
        """Quantise a matrix."""
        groups = grid.split(weight)
        scale, offset = grid.fit(groups)
        best, least, beta = grid.store(scale, offset), float("inf"), _BETA
        trial = best
        for _ in range(_STEPS):
            level = grid.levels(groups, trial)
            error = groups - grid.values(level, trial)
            size = float(error.abs().mean())
            if size >= least:
                break
            best, least = trial, size
            wanted = groups - _shrink(error, beta)
            if grid.has_offset:
                offset = (wanted - trial.scale[..., None] * level).mean(-1)
            else:
                squares = level.square().sum(-1)
                scale = (wanted * level).sum(-1) / torch.where(squares == 0, 1, squares)
            trial, beta = grid.store(scale, offset), beta * _GROWTH
        return grid.round(groups, best)


def _shrink(error: Float[Tensor, "o n g w"], beta: float) -> Float[Tensor, "o n g w"]:
    """The proximal step of the norm below 1."""
    size = error.abs()
    return error.sign() * (size - size.clamp(min=1e-8) ** (_NORM - 1) / beta).clamp(min=0)
