"""Matrices stored row by row, for kernels that read some of the rows."""

import torch
from jaxtyping import Float
from torch import Tensor

from foretell.model.kernels.pack import allocate
from foretell.model.kernels.structures import PANEL, Precision
from foretell.model.matrices.stored import Matrix, StoredMatrix


def widened(matrix: Matrix) -> Float[Tensor, "o i"]:
    """A matrix in float32."""
    return (matrix.widen() if isinstance(matrix, StoredMatrix) else matrix.detach()).float()


def row_tensor(matrix: Matrix, precision: Precision) -> Float[Tensor, "o i"]:
    """Rows of a whole number of panels, in float32 or bfloat16."""
    padded = torch.nn.functional.pad(widened(matrix), (0, -matrix.shape[1] % PANEL))
    return padded.to(torch.float32 if precision == "float32" else torch.bfloat16)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy, contiguous, in huge pages where the system has them: rows that lie apart take fewer TLB misses."""
    place = allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor)
