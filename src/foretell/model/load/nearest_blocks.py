"""Blocks of GGUF that no kernel reads, as blocks of the nearest type that one reads.

In most of these types a number is a whole multiple of a unit, the scale of its superblock. Q6_K has a whole scale of 8
bits for 16 such multiples and 6 bits for each, Q8_0 a scale of float16 for 32 and 8 bits for each: these hold the
numbers of many types, apart from the rounding of the scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt8

from foretell.model.matrices.kinds import BLOCKS, Kind

Array = np.ndarray
_LARGEST = 31
"""Of a level of Q6_K; the least one is -32."""
_SCALE = 127
"""Greatest whole scale of Q6_K, and greatest level of Q8_0."""


@dataclass(frozen=True)
class Nearest:
    """What a type becomes."""

    kind: Kind
    loss: float
    """Root of the mean squared change over that of the numbers, in per cent, of a model's matrices."""
    unit: Callable[[Array], Array] | None = None
    """Of which the numbers of each block are multiples; None: they are rounded to the nearest levels."""

    def memory(self, numbers: int) -> int:
        """Bytes of so many numbers."""
        per_block, size = BLOCKS[self.kind]
        return numbers // per_block * size

    @property
    def words(self) -> str:
        """What it becomes, and what that changes."""
        return f"{self.kind} " + (f"(a loss of {self.loss:.1g} %)" if self.loss else "(the same numbers)")


def _first(share: float) -> Callable[[Array], Array]:
    """The scale at the beginning of a block, times `share`."""
    return lambda blocks: _float16(blocks[:, :2]) * np.float32(share)


def _float16(raw: UInt8[Array, "b bytes"]) -> Float[Array, " b"]:
    scale: Array = np.ascontiguousarray(raw).view(np.float16)[:, 0].astype(np.float32)
    return scale


def _scattered(blocks: UInt8[Array, "b bytes"]) -> Float[Array, " b"]:
    """The scale of IQ1_M, whose bits are the upper ones of four words, over 8."""
    words = np.ascontiguousarray(blocks[:, -8:]).view(np.uint16)
    joined = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), 1)
    return joined.view(np.float16).astype(np.float32) / 8


_ROUNDED = Nearest("Q8_0", 0.6)
_NEAREST: Mapping[int, Nearest] = {
    10: _ROUNDED,  # Q2_K
    11: Nearest("Q6_K", 0.0, lambda blocks: _float16(blocks[:, -2:])),  # Q3_K
    16: Nearest("Q8_0", 0.02, _first(1 / 8)),  # IQ2_XXS
    17: _ROUNDED,  # IQ2_XS
    18: Nearest("Q6_K", 0.0, _first(1 / 2)),  # IQ3_XXS
    19: Nearest("Q6_K", 0.0, _first(1 / 8)),  # IQ1_S
    20: Nearest("Q8_0", 0.0, _first(1)),  # IQ4_NL
    21: Nearest("Q6_K", 0.0, _first(1)),  # IQ3_S
    22: _ROUNDED,  # IQ2_S
    23: Nearest("Q8_0", 0.02, _first(1)),  # IQ4_XS
    29: Nearest("Q6_K", 0.0, _scattered),  # IQ1_M
    34: Nearest("Q4_0", 0.0, lambda blocks: _float16(blocks[:, -2:])),  # TQ1_0
    35: Nearest("Q4_0", 0.0, lambda blocks: _float16(blocks[:, -2:])),  # TQ2_0
    40: Nearest("Q6_K", 0.02, lambda blocks: np.full(len(blocks), 2.0**-10, np.float32)),  # NVFP4, times its factor
}
"""By the number of a type in a file."""


def nearest_of(ggml_type: int, inputs: int) -> Nearest | None:
    """What a type becomes in a matrix of so many inputs; None: it stays as it is."""
    nearest = _NEAREST.get(ggml_type)
    return nearest if nearest is None or inputs % BLOCKS[nearest.kind][0] == 0 else _ROUNDED


def nearest_blocks(
    blocks: UInt8[Array, "b bytes"], ggml_type: int, inputs: int, factor: float = 1.0
) -> tuple[Kind, UInt8[Array, "b bytes"]]:
    """Blocks of rows of `inputs` numbers, times `factor`, as blocks of the nearest type."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    nearest, kind = nearest_of(ggml_type, inputs), GGMLQuantizationType(ggml_type)
    assert nearest is not None
    per_block, _ = BLOCKS[nearest.kind]
    numbers = dequantize(blocks, kind) * np.float32(factor)
    if nearest.unit is None:
        return "Q8_0", quantize(numbers.reshape(-1, 32), GGMLQuantizationType.Q8_0)
    ratio = numbers.shape[1] / per_block
    unit = np.repeat(nearest.unit(blocks) * np.float32(factor), max(1, int(ratio)))[:: max(1, int(1 / ratio))]
    numbers = numbers.reshape(-1, per_block)
    whole = np.rint(np.divide(numbers, unit[:, None], out=np.zeros_like(numbers), where=unit[:, None] != 0))
    return nearest.kind, _PACKED[nearest.kind](numbers, whole.astype(np.int32), unit)


def _q4_0(numbers: Float[Array, "b n"], whole: Int[Array, "b n"], unit: Float[Array, " b"]) -> UInt8[Array, "b bytes"]:
    levels = (whole + 8).astype(np.uint8)
    return np.concatenate([_as_float16(unit), levels[:, :16] | levels[:, 16:] << 4], 1)


def _q8_0(numbers: Float[Array, "b n"], whole: Int[Array, "b n"], unit: Float[Array, " b"]) -> UInt8[Array, "b bytes"]:
    """The multiples over their common divisor where they are too large; those that still are, rounded."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    most = np.abs(whole).max(1)
    common = np.where(most <= _SCALE, 1, np.gcd.reduce(whole, 1))
    levels = (whole // np.maximum(common, 1)[:, None]).astype(np.int8)
    made = np.concatenate([_as_float16(unit * common), levels.view(np.uint8)], 1)
    large = most > _SCALE * common
    if large.any():
        made[large] = quantize(numbers[large], GGMLQuantizationType.Q8_0)
    return made


def _q6_k(numbers: Float[Array, "b n"], whole: Int[Array, "b n"], unit: Float[Array, " b"]) -> UInt8[Array, "b bytes"]:
    """The multiples over the common divisor of 16 of them, which is their scale: rounded where it is no number of 8
    bits and cannot be made one by larger levels.
    """
    parts = whole.reshape(-1, 16, 16)
    scales = np.gcd.reduce(parts, 2)
    even = np.gcd.reduce(scales, 1)
    even = np.maximum(even & -even, 1)  # the power of two that all have
    parts, scales, unit = parts // even[:, None, None], np.maximum(scales // even[:, None], 1), unit * even
    large = np.nonzero(scales > _SCALE)
    common, most = scales[large], np.abs(parts[large]).max(1)
    for factor in range(2, _LARGEST + 1):
        fits = (common % factor == 0) & (common <= _SCALE * factor) & (most * factor <= common * _LARGEST)
        common = np.where(fits & (common > _SCALE), common // factor, common)
    scales[large] = common
    levels = (parts // scales[:, :, None] + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    shift = np.ceil(np.log2(np.maximum(scales.max(1) / _SCALE, 1)))
    stored = np.rint(scales / np.exp2(shift)[:, None]).astype(np.uint8)
    low, high = levels & 15, levels >> 4
    return np.concatenate(
        [
            (low[:, :, :2] | low[:, :, 2:] << 4).reshape(len(low), -1),
            (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(len(low), -1),
            stored,
            _as_float16(unit * np.exp2(shift)),
        ],
        1,
    )


def _as_float16(numbers: Float[Array, " b"]) -> UInt8[Array, "b 2"]:
    raw: Array = numbers.astype(np.float16)[:, None].view(np.uint8)
    return raw


_PACKED: Mapping[Kind, Callable[[Array, Array, Array], Array]] = {"Q4_0": _q4_0, "Q8_0": _q8_0, "Q6_K": _q6_k}
