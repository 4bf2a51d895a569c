"""Storage types of GGUF: blocks of 32 with float16 scales, and K-quants, whose blocks of 256 have 6-bit scales."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int, UInt8

from foretell.lab.quantize.grid import (
    Grid,
    Groups,
    Importance,
    Parameters,
    QuantizedRows,
    Scales,
    half_bytes,
    largest,
    to_half,
)
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.model.matrices.stored import StoredMatrix

Tensor = torch.Tensor
_CODE_MAX = 63
"""Largest 6-bit code of a scale or a minimum."""
_SEARCH = tuple(-1 + 0.1 * k for k in range(21))
"""Shifts of the highest level that the search for scales of K-quants tries."""


class GGUFGrid(Grid):
    """A storage type of GGUF."""

    kind: Kind

    @abstractmethod
    def pack(self, level: Int[Tensor, "o n b"], fields: tuple[Tensor, ...]) -> UInt8[Tensor, "o n bytes"]:
        """The blocks of the file."""

    def stored(self, quantized: QuantizedRows) -> StoredMatrix:
        """The matrix in the bytes of the file."""
        level = quantized.level.unflatten(1, (-1, self.block))
        data = self.pack(level, quantized.parameters.fields).flatten(1)
        return StoredMatrix(self.kind, quantized.level.shape[1], data)


class _Blocks(GGUFGrid):
    """32 inputs with one float16 scale, and a float16 minimum where the type has one."""

    groups = 1

    def __init__(self, kind: Kind, low: int, high: int, has_offset: bool) -> None:
        self.name, self.kind, self.block = kind, kind, BLOCKS[kind][0]
        self.low, self.high, self.has_offset = low, high, has_offset

    def fit(self, weight: Groups, importance: Importance = None) -> tuple[Scales, Scales]:
        """The scale that makes the extreme weights extreme levels."""
        if self.has_offset:
            least = weight.amin(-1)
            return (weight.amax(-1) - least) / self.high, least
        # More levels are negative than positive: the largest weight becomes the lowest level, whatever its sign.
        scale = largest(weight) / self.low if -self.low > self.high else weight.abs().amax(-1) / self.high
        return scale, torch.zeros_like(scale)

    def store(self, scale: Scales, offset: Scales) -> Parameters:
        """Round to float16."""
        d, m = to_half(scale), to_half(offset)
        return Parameters(d.float(), m.float(), (d[..., 0], m[..., 0]))

    def pack(self, level: Int[Tensor, "o n b"], fields: tuple[Tensor, ...]) -> UInt8[Tensor, "o n bytes"]:
        """Scale, minimum, highest bits, then the low halves of the levels."""
        heads = [half_bytes(field) for field in (fields if self.has_offset else fields[:1])]
        if self.high - self.low > 31:
            return torch.cat([*heads, level.to(torch.int8).view(torch.uint8)], -1)
        q = (level - self.low).to(torch.uint8)
        if self.high - self.low > 15:
            heads.append(_bits(q >> 4))
        return torch.cat([*heads, (q[..., :16] & 15) | (q[..., 16:] & 15) << 4], -1)


def _bits(bit: UInt8[Tensor, "o n b"]) -> UInt8[Tensor, "o n bytes"]:
    """Eight bits per byte, the first lowest."""
    return (bit.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)


class _AffineSuperBlocks(GGUFGrid):
    """Q4_K and Q5_K: 8 groups of 32 inputs; scales and minima are 6-bit multiples of two float16 numbers."""

    groups, low, has_offset = 8, 0, True

    def __init__(self, kind: Kind, high: int) -> None:
        self.name, self.kind, self.block, self.high = kind, kind, BLOCKS[kind][0], high

    def fit(self, weight: Groups, importance: Importance = None) -> tuple[Scales, Scales]:
        """Weighted least squares for the levels of several trial scales; minima are not positive."""
        least = weight.amin(-1).clamp(max=0)
        spread = weight.amax(-1) - least
        best_scale, best_offset = spread / self.high, least
        best = _error(weight, best_scale, best_offset, self.low, self.high, importance)
        for shift in _SEARCH:
            level = _nearest(weight, spread / (self.high + shift), least, self.low, self.high)
            scale, offset = _least_squares(weight, level, importance)
            error = _error(weight, scale, offset, self.low, self.high, importance)
            better = error < best
            best = torch.where(better, error, best)
            best_scale, best_offset = torch.where(better, scale, best_scale), torch.where(better, offset, best_offset)
        return best_scale, best_offset

    def store(self, scale: Scales, offset: Scales) -> Parameters:
        """Round to 6-bit codes times a float16 number per block."""
        scale, minimum = scale.clamp(min=0), (-offset).clamp(min=0)
        d, d_codes = _codes(scale)
        m, m_codes = _codes(minimum)
        return Parameters(d.float()[..., None] * d_codes, -(m.float()[..., None] * m_codes), (d, m, d_codes, m_codes))

    def pack(self, level: Int[Tensor, "o n b"], fields: tuple[Tensor, ...]) -> UInt8[Tensor, "o n bytes"]:
        """d, dmin, twelve bytes of codes, the highest bits of Q5_K, then the low halves of the levels."""
        d, m, d_codes, m_codes = fields
        q = level.to(torch.uint8).unflatten(-1, (4, 2, 32))
        parts = [half_bytes(d), half_bytes(m), _code_bytes(d_codes.to(torch.uint8), m_codes.to(torch.uint8))]
        if self.high > 15:
            high = (q.flatten(2, 3) >> 4).transpose(-1, -2)
            parts.append(_bits(high.flatten(2)))
        return torch.cat([*parts, (q[..., 0, :] & 15 | (q[..., 1, :] & 15) << 4).flatten(2)], -1)


def _codes(x: Scales) -> tuple[Float[Tensor, "o n"], Scales]:
    """A float16 unit per block, and multiples of it in 0 .. 63."""
    unit = to_half(x.amax(-1) / _CODE_MAX)
    wide = unit.float()[..., None]
    return unit, torch.where(wide == 0, 0, x / wide).round().clamp(0, _CODE_MAX)


def _code_bytes(scale: UInt8[Tensor, "o n 8"], minimum: UInt8[Tensor, "o n 8"]) -> UInt8[Tensor, "o n 12"]:
    """Eight pairs of 6-bit codes: the last four are split into low halves and high bits."""
    first = [part[..., :4] & 63 | (part[..., 4:] >> 4) << 6 for part in (scale, minimum)]
    return torch.cat([*first, scale[..., 4:] & 15 | (minimum[..., 4:] & 15) << 4], -1)


def _nearest(weight: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return ((weight - offset[..., None]) * inverse[..., None]).round().clamp(low, high)


def _error(weight: Tensor, scale: Tensor, offset: Tensor, low: int, high: int, importance: Tensor | None) -> Scales:
    level = _nearest(weight, scale, offset, low, high)
    squared = (scale[..., None] * level + offset[..., None] - weight).square()
    return (squared if importance is None else squared * importance).sum(-1)


def _least_squares(weight: Tensor, level: Tensor, importance: Tensor | None) -> tuple[Scales, Scales]:
    """Scale and non-positive offset of least weighted squared error for these levels."""
    share = torch.ones_like(weight) if importance is None else importance.expand_as(weight)
    total, mean_level, mean_weight = share.sum(-1), (share * level).sum(-1), (share * weight).sum(-1)
    squares, products = (share * level * level).sum(-1), (share * level * weight).sum(-1)
    determinant = total * squares - mean_level.square()
    solvable = determinant > 0
    safe = torch.where(solvable, determinant, 1)
    scale = torch.where(solvable, (total * products - mean_level * mean_weight) / safe, 0)
    offset = torch.where(solvable, (squares * mean_weight - mean_level * products) / safe, 0)
    through_zero = torch.where(squares > 0, products / torch.where(squares > 0, squares, 1), 0)
    positive = offset > 0
    return torch.where(positive, through_zero, scale).clamp(min=0), torch.where(positive, 0, offset)


class _SymmetricSuperBlocks(GGUFGrid):
    """Q6_K: 16 groups of 16 inputs; scales are int8 multiples of a float16 number."""

    groups, low, high, has_offset = 16, -32, 31, False

    def __init__(self, kind: Kind) -> None:
        self.name, self.kind, self.block = kind, kind, BLOCKS[kind][0]

    def fit(self, weight: Groups, importance: Importance = None) -> tuple[Scales, Scales]:
        """Weighted least squares for the levels of several trial scales."""
        extreme = largest(weight)
        zero = torch.zeros_like(extreme)
        best_scale = extreme / self.low
        best = _error(weight, best_scale, zero, self.low, self.high, importance)
        share = torch.ones_like(weight) if importance is None else importance.expand_as(weight)
        for shift in _SEARCH:
            level = _nearest(weight, extreme / (self.low + shift), zero, self.low, self.high)
            squares = (share * level * level).sum(-1)
            scale = (share * level * weight).sum(-1) / torch.where(squares == 0, 1, squares)
            error = _error(weight, scale, zero, self.low, self.high, importance)
            better = error < best
            best, best_scale = torch.where(better, error, best), torch.where(better, scale, best_scale)
        return best_scale, zero

    def store(self, scale: Scales, offset: Scales) -> Parameters:
        """Round to int8 codes times a float16 number per block."""
        d = to_half(largest(scale) / -128)
        wide = d.float()[..., None]
        codes = torch.where(wide == 0, 0, scale / wide).round().clamp(-128, 127)
        return Parameters(wide * codes, torch.zeros_like(scale), (d, codes))

    def pack(self, level: Int[Tensor, "o n b"], fields: tuple[Tensor, ...]) -> UInt8[Tensor, "o n bytes"]:
        """Low halves, high bits, codes, d."""
        d, codes = fields
        q = (level - self.low).to(torch.uint8).unflatten(-1, (2, 4, 32))
        low = (q[..., :2, :] & 15) | (q[..., 2:, :] & 15) << 4
        high = ((q >> 4) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(-2).to(torch.uint8)
        return torch.cat([low.flatten(2), high.flatten(2), codes.to(torch.int8).view(torch.uint8), half_bytes(d)], -1)


GGUF_GRIDS: Mapping[str, GGUFGrid] = {
    "Q4_0": _Blocks("Q4_0", -8, 7, has_offset=False),
    "Q4_1": _Blocks("Q4_1", 0, 15, has_offset=True),
    "Q5_0": _Blocks("Q5_0", -16, 15, has_offset=False),
    "Q5_1": _Blocks("Q5_1", 0, 31, has_offset=True),
    "Q8_0": _Blocks("Q8_0", -127, 127, has_offset=False),
    "Q4_K": _AffineSuperBlocks("Q4_K", 15),
    "Q5_K": _AffineSuperBlocks("Q5_K", 31),
    "Q6_K": _SymmetricSuperBlocks("Q6_K"),
}
"""Storage types that can be written, by name."""
FALLBACK: Mapping[str, str] = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types of matrices whose rows are no whole blocks of 256, as llama.cpp chooses them."""
