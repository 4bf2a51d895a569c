"""Linear maps by least squares from streamed moments: no state is kept (Jump to Conclusions, arXiv 2303.09435)."""

import torch
from jaxtyping import Float

RIDGE = 1e-3
"""Weight of the ridge, over the mean square of an input."""


class LeastSquares:
    """The linear map that gives targets from inputs with the least squared error, without intercept.

    Sums are float64, so that the result does not depend on the order of the rows, nor on how they were added. With
    fewer rows than inputs the ridge decides.

    `inputs`, `outputs`: widths.
    """

    def __init__(self, inputs: int, outputs: int, ridge: float = RIDGE) -> None:
        self._ridge, self.rows = ridge, 0
        self._gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._cross = torch.zeros(inputs, outputs, dtype=torch.float64)

    def add(self, x: Float[torch.Tensor, "t i"], y: Float[torch.Tensor, "t o"]) -> None:
        """Add rows."""
        x = x.double()
        self._gram += x.T @ x
        self._cross += x.T @ y.double()
        self.rows += len(x)

    def solve(self) -> Float[torch.Tensor, "o i"]:
        """The map as the weight of a linear layer, float32.

        Raises:
            ValueError: no rows were added.
        """
        if not self.rows:
            raise ValueError("a linear map cannot be fitted to no rows at all")
        size = len(self._gram)
        mu = self._ridge * float(self._gram.trace()) / size
        factor = torch.linalg.cholesky(self._gram + mu * torch.eye(size, dtype=torch.float64))
        return torch.cholesky_solve(self._cross, factor).T.float().contiguous()
