"""Round to nearest."""

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import InputStatistics, Quantizer, Role
from foretell.lab.quantize.grid import Grid, QuantizedRows, Weight


def round_to_nearest(weight: Float[torch.Tensor, "o i"], grid: Grid) -> QuantizedRows:
    """Every weight rounded to the nearest number of its group."""
    groups = grid.split(weight)
    return grid.round(groups, grid.store(*grid.fit(groups)))


class RTN(Quantizer):
    """Round to nearest; needs no data."""

    calibrated = False

    def quantize(self, role: Role, weight: Weight, grid: Grid, inputs: InputStatistics | None) -> QuantizedRows:
        """Round a matrix."""
        return round_to_nearest(weight, grid)
