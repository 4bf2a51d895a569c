"""SparseGPT (Frantar and Alistarh, arXiv 2301.00774): the inputs that stay make up for those that are pruned."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.lab.compress.pruning import Magnitude
from foretell.lab.compress.sparsity import least_in_rows
from foretell.lab.quantize.base import InputStatistics
from foretell.lab.quantize.gptq import inverse_factor, round_column
from foretell.lab.quantize.integer_grid import IntegerGrid

Tensor = torch.Tensor
_LAZY = 128
"""Columns that are pruned before the columns after them are updated together."""
GROUP = 32
"""Inputs that share a scale where weights are rounded, too."""
_DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean."""


@dataclass(frozen=True)
class SparseGPT(Magnitude):
    """Prunes column by column and spreads the error of each over the columns after it, by the second moment of the
    inputs. The share holds for blocks of 128 columns over all outputs, not for every output.

    `bits`: the weights that stay are rounded to so many bits with a scale per output and `GROUP` inputs, in the same
    pass, as GPTQ does; None: they are not.
    """

    bits: int | None = None
    calibrated = True

    def check(self, outputs: int, inputs: int, name: str) -> None:
        """Refuse rows that are no whole groups.

        Raises:
            ValueError: the matrix has such rows.
        """
        super().check(outputs, inputs, name)
        if self.bits is not None and inputs % GROUP:
            raise ValueError(f"the {inputs} inputs of {name} are no whole groups of {GROUP}, as --bits needs")
        pattern = self.sparsity.pattern
        if self.bits is not None and pattern is not None and GROUP % pattern.group:
            raise ValueError(f"--bits needs a pattern whose group divides {GROUP}, found --pattern {pattern}")

    def compress(self, weight: Float[Tensor, "o i"], inputs: InputStatistics | None) -> Float[Tensor, "o i"]:
        """The pruned matrix, with changed weights.

        Raises:
            ValueError: the statistics of the inputs are not finite.
        """
        assert inputs is not None
        hessian, left, out = inputs.second_moment.clone(), weight.clone(), torch.empty_like(weight)
        dead = hessian.diagonal() == 0
        hessian.diagonal()[dead] = 1
        left[:, dead] = 0
        factor = inverse_factor(hessian, _DAMPING)
        group = 1 if self.sparsity.pattern is None else self.sparsity.pattern.group
        span = group * max(_LAZY // group, 1)
        for start in range(0, weight.shape[1], span):
            end = min(start + span, weight.shape[1])
            out[:, start:end], errors = self._prune_block(left[:, start:end].clone(), factor[start:end, start:end])
            left[:, end:] -= errors @ factor[start:end, end:]
        return out

    def _prune_block(
        self, local: Float[Tensor, "o b"], factor: Float[Tensor, "b b"]
    ) -> tuple[Float[Tensor, "o b"], Float[Tensor, "o b"]]:
        """The pruned columns of a block, and the error of each in units of the factor's diagonal."""
        scale, pattern, out = factor.diagonal(), self.sparsity.pattern, torch.empty_like(local)
        grid = None if self.bits is None else IntegerGrid(self.bits, GROUP, symmetric=True)
        errors = torch.empty_like(local)
        pruned = self._least_of_all(local, scale) if pattern is None else torch.zeros_like(local, dtype=torch.bool)
        for j in range(local.shape[1]):
            if pattern is not None and j % pattern.group == 0:
                here = slice(j, j + pattern.group)
                pruned[:, here] = self.sparsity.pruned((local[:, here] / scale[here]).square())
            kept = local[:, j]
            if grid is not None:
                if j % GROUP == 0:
                    here = slice(j, j + GROUP)
                    parameters = grid.store(*grid.fit(grid.split(local[:, here].masked_fill(pruned[:, here], 0))))
                kept = round_column(kept, grid, parameters, 0, 0)[1]
            out[:, j] = kept.masked_fill(pruned[:, j], 0)
            errors[:, j] = (local[:, j] - out[:, j]) / scale[j]
            local[:, j:] -= errors[:, j, None] * factor[j, j:]
        return out, errors

    def _least_of_all(self, local: Float[Tensor, "o b"], scale: Float[Tensor, " b"]) -> Bool[Tensor, "o b"]:
        """The weights of a block that cost least, over all outputs together."""
        score = (local / scale).square().flatten()
        return least_in_rows(score, round(self.sparsity.share * len(score))).view_as(local)
