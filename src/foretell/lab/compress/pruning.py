"""Pruning by a score of every weight: magnitude, and Wanda. The weights that stay are not changed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.lab.compress.base import Compressor
from foretell.lab.compress.sparsity import Sparsity
from foretell.lab.quantize.base import InputStatistics

Tensor = torch.Tensor


@dataclass(frozen=True)
class Magnitude(Compressor):
    """Zeroes the weights of least magnitude within every output (Han et al., arXiv 1506.02626)."""

    sparsity: Sparsity
    calibrated = False

    def check(self, outputs: int, inputs: int, name: str) -> None:
        """Refuse rows that are no whole groups of the pattern.

        Raises:
            ValueError: the matrix has such rows.
        """
        self.sparsity.check(inputs, name)

    def compress(self, weight: Float[Tensor, "o i"], inputs: InputStatistics | None) -> Float[Tensor, "o i"]:
        """The pruned matrix."""
        return weight.masked_fill(self.sparsity.pruned(weight.abs()), 0)


class Wanda(Magnitude):
    """Zeroes the weights of least |w_ij| * ||x_j|| within every output, with the inputs x_j of the calibration text
    (Sun et al., arXiv 2306.11695).
    """

    calibrated = True

    def compress(self, weight: Float[Tensor, "o i"], inputs: InputStatistics | None) -> Float[Tensor, "o i"]:
        """The pruned matrix."""
        assert inputs is not None
        score = weight.abs() * inputs.second_moment.diagonal().sqrt()
        return weight.masked_fill(self.sparsity.pruned(score), 0)
