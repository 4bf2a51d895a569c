"""GPTQ (Frantar et al., arXiv 2210.17323): the error of each input is compensated by the inputs after it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from foretell.lab.quantize.base import InputStatistics, Quantizer, Role
from foretell.lab.quantize.grid import Grid, Parameters, QuantizedRows, Weight

Tensor = torch.Tensor
_LAZY = 128
"""Columns that are quantised before the columns after them are updated together."""
_MAX_DAMPING = 1.0


@dataclass(frozen=True)
class GPTQ(Quantizer):
    """`damping`: added to the diagonal of the Hessian, as a share of its mean. `act_order`: inputs of large second
    moment first, with scales from the original weights (static groups), so that the groups of the file stay in order.
    """

    damping: float = 0.01
    act_order: bool = True

    def quantize(self, role: Role, weight: Weight, grid: Grid, inputs: InputStatistics | None) -> QuantizedRows:
        """Quantise a matrix.

        Raises:
            ValueError: the statistics of the inputs are not finite.
        """
        assert inputs is not None
        hessian, weight = inputs.second_moment.clone(), weight.clone()
        dead = hessian.diagonal() == 0
        hessian.diagonal()[dead] = 1
        weight[:, dead] = 0
        order = hessian.diagonal().argsort(descending=True, stable=True) if self.act_order else None
        factor = inverse_factor(hessian if order is None else hessian[order][:, order], self.damping)
        importance = grid.split(hessian.diagonal()[None])[0]
        if order is None:
            return _quantize(weight, grid, factor, importance)
        return _quantize(weight, grid, factor, importance, order, grid.store(*grid.fit(grid.split(weight), importance)))


def inverse_factor(hessian: Float[Tensor, "i i"], damping: float) -> Float[Tensor, "i i"]:
    """The upper Cholesky factor of the inverse; the damping grows where rounding makes the matrix indefinite."""
    mean = hessian.diagonal().mean()
    while damping <= _MAX_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping = max(10 * damping, 1e-4)
    raise ValueError("the calibration inputs of a matrix are not finite, or too few; give more --calibration-tokens")


def _quantize(
    weight: Float[Tensor, "o i"],
    grid: Grid,
    factor: Float[Tensor, "i i"],
    importance: Float[Tensor, "n g w"],
    order: Int[Tensor, " i"] | None = None,
    parameters: Parameters | None = None,
) -> QuantizedRows:
    """Inputs in this order, with given scales; None: ascending, and the scales of a block come from its weights as the
    inputs before it have changed them.
    """
    inputs, span = weight.shape[1], _LAZY if order is not None else grid.block * -(-_LAZY // grid.block)
    permuted, columns = (weight, list(range(inputs))) if order is None else (weight[:, order], order.tolist())
    levels, parts = torch.empty(weight.shape, dtype=torch.int16), list[Parameters]()
    for start in range(0, inputs, span):
        end = min(start + span, inputs)
        local, errors, corner = (
            permuted[:, start:end].clone(),
            weight.new_empty(len(weight), end - start),
            factor[start:end],
        )
        for j in range(end - start):
            block, within = divmod(columns[start + j], grid.block)
            if parameters is None and within == 0:
                groups = grid.split(local[:, j : j + grid.block])
                parts.append(grid.store(*grid.fit(groups, importance[block : block + 1])))
            scales, at = (parts[-1], 0) if parameters is None else (parameters, block)
            level, value = round_column(local[:, j], grid, scales, at, within // grid.width)
            levels[:, columns[start + j]] = level
            errors[:, j] = (local[:, j] - value) / corner[j, start + j]
            local[:, j:] -= errors[:, j, None] * corner[j, start + j : end]
        permuted[:, end:] -= errors @ corner[:, end:]
    return QuantizedRows(grid, levels, Parameters.join(parts) if parameters is None else parameters)


def round_column(
    weight: Float[Tensor, " o"], grid: Grid, parameters: Parameters, block: int, group: int
) -> tuple[Float[Tensor, " o"], Float[Tensor, " o"]]:
    """Levels and numbers of one input, by the parameters of its group in a block."""
    scale, offset = parameters.scale[:, block, group], parameters.offset[:, block, group]
    level = ((weight - offset) * torch.where(scale == 0, 0, 1 / scale)).round().clamp(grid.low, grid.high)
    return level, scale * level + offset
