"""The Hadamard rotation, which spreads outliers over the inputs of a product (QuaRot, arXiv 2404.00456)."""

import functools

import torch
from jaxtyping import Float


@functools.cache
def hadamard_matrix(size: int, device: torch.device) -> Float[torch.Tensor, "n n"]:
    """The orthonormal symmetric Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix * size**-0.5).to(device)
