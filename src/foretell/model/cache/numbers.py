"""Rounding of cached keys and values: a scale per token and head, and 8 or 4 bits per dimension.

Heads are rotated by a Hadamard matrix first, which spreads outliers over their dimensions (QuaRot, arXiv 2404.00456).
Every token is rounded by itself when it is written, so its numbers do not depend on what else is in the pass. Groups of
tokens are rounded in `packed_groups`.
"""

import torch
from jaxtyping import Float, Int8

from foretell.model.matrices.hadamard import hadamard_matrix

FP8_LIMIT = 448
"""Largest 8-bit float (e4m3, in whose bytes `fp8` is stored), which the largest magnitude of a head becomes."""
INT8_LIMIT = 127
"""Largest int8 number: the scale of a token's head is its largest magnitude over this."""
INT4_LIMIT = 15
"""Of a level n from 0 to 15, the number 2 n - 15 is multiplied by the scale: the largest magnitude over this."""
_ROTATED_BLOCKS = 64, 16, 1
"""Dimensions that are rotated together: as many as divide a head."""


def rotation_size(head_dim: int) -> int:
    """Dimensions of a head that are rotated together; 1: none."""
    return next(block for block in _ROTATED_BLOCKS if head_dim % block == 0)


def rotate_blocks(x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
    """Every head times a Hadamard matrix over blocks of its dimensions, the same in both directions."""
    size = rotation_size(x.shape[-1])
    return (x.unflatten(-1, (-1, size)) @ hadamard_matrix(size, x.device)).flatten(-2)


def quantize(
    x: Float[torch.Tensor, "*t d"], bits: int, floats: bool = False
) -> tuple[Int8[torch.Tensor, "*t n"], Float[torch.Tensor, "*t"]]:
    """Numbers of rotated heads, as they are stored, and their scales; of 4 bits, a byte holds the levels of dimensions
    i and i + d/2. `floats`: the bytes of 8-bit floats.
    """
    peak = x.abs().amax(-1, keepdim=True)
    if floats:
        scaled = (x * torch.where(peak > 0, FP8_LIMIT / peak, 0)).clamp(-FP8_LIMIT, FP8_LIMIT)
        return scaled.to(torch.float8_e4m3fn).view(torch.int8), peak[..., 0] / FP8_LIMIT
    if bits == 8:
        numbers = (x * torch.where(peak > 0, INT8_LIMIT / peak, 0)).round()
        return numbers.to(torch.int8), peak[..., 0] / INT8_LIMIT
    half = peak / INT4_LIMIT
    levels = ((x - half) * torch.where(peak > 0, INT4_LIMIT / (2 * peak), 0)).round() + 8
    low, high = levels.to(torch.uint8).chunk(2, -1)
    return (low | high << 4).view(torch.int8), half[..., 0]


def widen(numbers: Int8[torch.Tensor, "*t n"], bits: int, floats: bool = False) -> Float[torch.Tensor, "*t d"]:
    """Rotated heads over their scales, from numbers as they are stored."""
    if floats:
        return numbers.view(torch.float8_e4m3fn).float()
    if bits == 8:
        return numbers.float()
    levels = numbers.view(torch.uint8)
    return 2.0 * torch.cat((levels & 15, levels >> 4), -1).float() - INT4_LIMIT


def join_halves(upper: Int8[torch.Tensor, "*t n"], lower: Int8[torch.Tensor, "*t n"]) -> Float[torch.Tensor, "*t d"]:
    """int8 numbers from their upper and lower halves, a byte of which holds those of dimensions i and i + d/2."""
    high, low = (
        torch.cat((part & 15, part >> 4), -1).int() for part in (upper.view(torch.uint8), lower.view(torch.uint8))
    )
    return (16 * high + low - 128).float()
