"""Blocks of GGUF that no kernel reads, as blocks of the nearest type that one reads.

In most of these types a number is a level times a scale, of which 16 or 32 numbers have one: whole numbers of a few
bits, in units of the scale of their superblock. Q6_K has a whole scale of 8 bits for 16 levels of 6 bits, Q8_0 a scale
of float16 for 32 levels of 8 bits. The layouts are those of `gguf.quants`, with whole numbers in place of floats, which
takes a tenth of the time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int8, UInt8

from foretell.model.matrices.kinds import BLOCKS, Kind

Array = np.ndarray
_TWO_BITS, _NIBBLES, _BITS, _SEVENS = (0, 2, 4, 6), (0, 4), tuple(range(8)), (0, 7, 14, 21)
_TRITS = np.array([1, 3, 9, 27, 81], np.uint8)


@dataclass(frozen=True)
class Nearest:
    """What a type becomes."""

    kind: Kind
    loss: float
    """Root of the mean squared change over that of the numbers, in per cent, of a model's matrices."""
    convert: Callable[[Array, float], Array]
    """Blocks, times a factor, as blocks of the kind."""

    def memory(self, numbers: int) -> int:
        """Bytes of so many numbers."""
        per_block, size = BLOCKS[self.kind]
        return numbers // per_block * size

    @property
    def words(self) -> str:
        """What it becomes, and what that changes."""
        return f"{self.kind} " + (f"(a loss of {self.loss:.1g} %)" if self.loss else "(the same numbers)")


def nearest_of(ggml_type: int) -> Nearest | None:
    """What a type becomes, by its number in a file; None: it stays as it is."""
    return _NEAREST.get(ggml_type)


def _fields(raw: Array, shifts: Sequence[int], most: int, width: int = 1) -> UInt8[Array, "b n"]:
    """The bits from each shift on of `width` bytes or words, then those of the next ones."""
    own = raw.reshape(len(raw), -1, 1, width) >> np.array(shifts, raw.dtype)[:, None]
    return (own & raw.dtype.type(most)).astype(np.uint8).reshape(len(raw), -1)


def _float16(raw: UInt8[Array, "b 2"]) -> Float[Array, "b 1"]:
    scale: Array = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return scale


@cache
def _grid(name: str) -> Array:
    """The levels that an index stands for, as one word of 4 or 8 bytes."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    levels = np.ascontiguousarray(kind.grid[0, 0].astype(np.int8))
    return levels.view(np.uint32 if levels.shape[1] == 4 else np.uint64)[:, 0]


def _levels(name: str, index: Array, signs: UInt8[Array, "b eighths"] | None = None) -> Int8[Array, "b n"]:
    """The levels of indices, times the signs of eight by the bits of a byte."""
    levels: Array = np.take(_grid(name), index).view(np.int8)
    if signs is not None:
        levels *= np.take(_sign_table(), signs).view(np.int8)
    return levels


@cache
def _sign_table() -> Array:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (1 - 2 * bits.view(np.int8)).view(np.uint64)[:, 0]


def _signs(index: Array) -> UInt8[Array, "b n"]:
    """The bytes of signs, of which 7 bits give the eighth."""
    from gguf.quants import IQ2_XXS

    return np.take(np.frombuffer(IQ2_XXS.ksigns, np.uint8), index)


def _iq2_xxs(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    words = np.ascontiguousarray(raw[:, 2:]).view(np.uint32).reshape(len(raw), 8, 2)
    index, rest = np.ascontiguousarray(words[..., 0]).view(np.uint8), np.ascontiguousarray(words[..., 1])
    scale = _float16(raw[:, :2]) * factor / 8 * (2 * (rest >> 28) + 1)
    return _q8_0(_levels("IQ2_XXS", index, _signs(_fields(rest, _SEVENS, 127))), scale)


def _iq2_xs(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    words = np.ascontiguousarray(raw[:, 2:66]).view(np.uint16)
    levels = _levels("IQ2_XS", words & np.uint16(511), _signs(words >> 9))
    return _rounded(levels, _float16(raw[:, :2]) * factor / 8 * (2 * _fields(raw[:, 66:], _NIBBLES, 15) + 1.0))


def _iq2_s(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    index = raw[:, 2:34] | _fields(raw[:, 66:74], _TWO_BITS, 3).astype(np.uint16) << 8
    levels = _levels("IQ2_S", index, raw[:, 34:66])
    return _rounded(levels, _float16(raw[:, :2]) * factor / 8 * (2 * _fields(raw[:, 74:], _NIBBLES, 15) + 1.0))


def _iq3_xxs(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    words = np.ascontiguousarray(raw[:, 66:]).view(np.uint32)
    levels, scales = _levels("IQ3_XXS", raw[:, 2:66], _signs(_fields(words, _SEVENS, 127))) // 2, 2 * (words >> 28) + 1
    return _q6_k(levels, np.repeat(scales, 2, 1), _float16(raw[:, :2]) * factor / 2)


def _iq3_s(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    index = raw[:, 2:66] | _fields(raw[:, 66:74], _BITS, 1).astype(np.uint16) << 8
    scales = np.repeat(2 * _fields(raw[:, 106:], _NIBBLES, 15) + 1, 2, 1)
    return _q6_k(_levels("IQ3_S", index, raw[:, 74:106]), scales, _float16(raw[:, :2]) * factor)


def _iq1_s(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    words = np.ascontiguousarray(raw[:, 34:]).view(np.uint16)
    index = raw[:, 2:34] | _fields(words, (0, 3, 6, 9), 7).astype(np.uint16) << 8
    shift = 1 - 2 * (words >> 15).astype(np.int8)
    levels = 8 * _levels("IQ1_S", index) + np.repeat(shift, 32, 1)
    return _q6_k(levels, np.repeat(2 * (words >> 12 & 7) + 1, 2, 1), _float16(raw[:, :2]) * factor / 8)


def _iq1_m(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    words, high = np.ascontiguousarray(raw[:, 48:]).view(np.uint16), _fields(raw[:, 32:48], _NIBBLES, 15)
    levels = 8 * _levels("IQ1_M", raw[:, :32] | (high & 7).astype(np.uint16) << 8)
    levels += np.repeat(1 - 2 * (high >> 3).astype(np.int8), 8, 1)
    joined = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), 1, keepdims=True)
    unit = joined.view(np.float16).astype(np.float32) * factor / 8
    return _q6_k(levels, 2 * _fields(words, (0, 3, 6, 9), 7) + 1, unit)


def _q2_k(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    units = _float16(raw[:, 80:82]) * factor, _float16(raw[:, 82:84]) * factor
    levels = _fields(raw[:, 16:80], _TWO_BITS, 3, 32)
    return _rounded(levels, units[0] * (raw[:, :16] & 15), units[1] * (raw[:, :16] >> 4))


def _q3_k(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    levels = _fields(raw[:, 32:96], _TWO_BITS, 3, 32) | _fields(raw[:, :32], _BITS, 1, 32) << 2
    scales = _fields(raw[:, 96:104], _NIBBLES, 15, 8) | _fields(raw[:, 104:108], _TWO_BITS, 3, 4) << 4
    return _q6_k(levels.view(np.int8) - 4, scales - np.uint8(32), _float16(raw[:, 108:]) * factor)


def _tq1_0(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    parts = (raw[:, :32], _TRITS), (raw[:, 32:48], _TRITS), (raw[:, 48:52], _TRITS[:4])
    fifths = [(part[:, None] * powers[:, None]).reshape(len(raw), -1) for part, powers in parts]
    levels = (np.concatenate(fifths, 1).astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return _q4_0(levels + 7, _float16(raw[:, 52:]) * factor)


def _tq2_0(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    return _q4_0(_fields(raw[:, :64], _TWO_BITS, 3, 32) + 7, _float16(raw[:, 64:]) * factor)


def _nvfp4(raw: Array, factor: float) -> UInt8[Array, "b bytes"]:
    scales = np.where(raw[:, :4] == 0x7F, 0, raw[:, :4] & 0x7F)  # not a number means zero
    return np.concatenate([np.full((len(raw), 1), factor, np.float32).view(np.uint8), scales, raw[:, 4:]], 1)


def _q4_0(levels: UInt8[Array, "b n"], unit: Float[Array, "b 1"]) -> UInt8[Array, "blocks bytes"]:
    parts = levels.reshape(-1, 2, 16)
    scales = np.repeat(_as_float16(unit), levels.shape[1] // 32, 0)
    return np.concatenate([scales, parts[:, 0] | parts[:, 1] << 4], 1)


def _q8_0(levels: Int8[Array, "b n"], scale: Float[Array, "b s"]) -> UInt8[Array, "blocks bytes"]:
    return np.concatenate([_as_float16(scale.reshape(-1, 1)), levels.reshape(-1, 32).view(np.uint8)], 1)


def _rounded(
    levels: Array, scale: Float[Array, "b 16"], offset: Float[Array, "b 16"] | None = None
) -> UInt8[Array, "blocks bytes"]:
    """Levels times their scales, less offsets, as the nearest ones of Q8_0."""
    numbers = levels.reshape(len(levels), -1, 16) * scale[..., None].astype(np.float32)
    if offset is not None:
        numbers -= offset[..., None]
    numbers = numbers.reshape(-1, 32)
    unit = np.abs(numbers).max(1, keepdims=True) / np.float32(127)
    numbers *= np.divide(1, unit, out=np.zeros_like(unit), where=unit > 0)
    return _q8_0(np.rint(numbers, out=numbers).astype(np.int8), unit)


def _q6_k(levels: Int8[Array, "b 256"], scales: Array, unit: Float[Array, "b 1"]) -> UInt8[Array, "b bytes"]:
    parts = (levels + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
    low, high = parts & 15, parts >> 4
    low = low[:, :, :2] | low[:, :, 2:] << 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [part.reshape(len(levels), -1) for part in (low, high, scales.astype(np.uint8))]
    return np.concatenate([*parts, _as_float16(unit)], 1)


def _as_float16(numbers: Float[Array, "b 1"]) -> UInt8[Array, "b 2"]:
    raw: Array = numbers.astype(np.float16).view(np.uint8)
    return raw


_NEAREST: Mapping[int, Nearest] = {
    10: Nearest("Q8_0", 0.6, _q2_k),
    11: Nearest("Q6_K", 0.0, _q3_k),
    16: Nearest("Q8_0", 0.02, _iq2_xxs),
    17: Nearest("Q8_0", 0.6, _iq2_xs),
    18: Nearest("Q6_K", 0.0, _iq3_xxs),
    19: Nearest("Q6_K", 0.0, _iq1_s),
    21: Nearest("Q6_K", 0.0, _iq3_s),
    22: Nearest("Q8_0", 0.6, _iq2_s),
    29: Nearest("Q6_K", 0.0, _iq1_m),
    34: Nearest("Q4_0", 0.0, _tq1_0),
    35: Nearest("Q4_0", 0.0, _tq2_0),
    40: Nearest("NVFP4", 0.0, _nvfp4),
}
"""By the number of a type in a file."""
