"""Numbers of cached keys and values in kernels: as the model computes, int8, or 8-bit floats with a scale per token and
head, of heads that a Hadamard matrix has rotated; see `cache.numbers`.
"""

import triton
import triton.language as tl

PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_INT8_LIMIT = tl.constexpr(127.0)
_FP8_LIMIT = tl.constexpr(448.0)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: a float32 of less than 2**22 plus this minus this is rounded to an integer, ties to even."""


@triton.jit
def rotated(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG2_SIZE: tl.constexpr):
    """float32 rows times the Hadamard matrix over blocks of `2**LOG2_SIZE` dimensions (0: as they are), by sums and
    differences of halves: a product would take all registers.
    """
    for power in tl.static_range(LOG2_SIZE):
        pairs = tl.permute(tl.reshape(x, [ROWS * DIM >> (power + 1), 2, 1 << power]), [0, 2, 1])
        left, right = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), [0, 2, 1]), [ROWS, DIM])
    return x * (2.0 ** (-LOG2_SIZE / 2)) if LOG2_SIZE > 0 else x


@triton.jit
def widened(x, dtype: tl.constexpr, NUMBERS: tl.constexpr):
    """Stored numbers in the dtype of a product, which holds each exactly; without their scales."""
    if NUMBERS == FP8:
        # The bits of e4m3 in those of a float16 have an exponent that is 8 too small. No instruction for it before 8.9.
        code = x.to(tl.int16)
        half = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.float16, bitcast=True)
        x = half.to(tl.float32) * 256.0
    return x.to(dtype)


@triton.jit
def stored(x, NUMBERS: tl.constexpr):
    """Rotated float32 heads `[n, d]` as int8 numbers or the bytes of 8-bit floats, and their scales `[n]`."""
    peak = tl.max(tl.abs(x), 1)
    limit: tl.constexpr = _INT8_LIMIT if NUMBERS == INT8 else _FP8_LIMIT
    factor = tl.where(peak > 0, tl.math.div_rn(tl.zeros_like(peak) + limit, tl.where(peak > 0, peak, 1.0)), 0.0)
    scaled = x * factor[:, None]
    number = (scaled + _ROUND - _ROUND).to(tl.int32) if NUMBERS == INT8 else _fp8_bits(scaled)
    return number.to(tl.int8), tl.math.div_rn(peak, tl.zeros_like(peak) + limit)


@triton.jit
def _fp8_bits(x):
    """Bytes of the nearest e4m3 numbers, ties to even, of magnitudes up to about 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 numbers are multiples of 2**-9, which is the last bit of 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    return tl.where(x < 0, code - 128, code)
