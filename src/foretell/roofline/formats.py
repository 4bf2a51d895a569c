"""Number formats: bytes per element with quantisation metadata, and the format in which two operands multiply."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from foretell.roofline.names import look_up

DTYPES = {"bfloat16": "16", "int8": "8", "float32": "32"}
"""Formats by the names of dtypes."""
SCALE_BITS = 16
"""Bits of a group's scale, and of its zero point."""


@dataclass(frozen=True)
class NumberFormat:
    """A storage format: `bits` per element, and `group_bits` of metadata per group of `group` elements (0: none)."""

    name: str
    bits: float
    is_float: bool
    group: int = 0
    group_bits: int = 0

    @property
    def bytes(self) -> float:
        """Bytes per element, scales and zero points included."""
        return (self.bits + (self.group_bits / self.group if self.group else 0.0)) / 8


def parse_format(text: str) -> NumberFormat:
    """Parse a format: `16`, `32`, `fp8`, `fp4`, integers `1` to `8`, and `4g128` (one 16-bit scale per 128) or `4g128z`
    (a zero point too).

    Raises:
        ValueError: the text names no format.
    """
    match = re.fullmatch(r"(fp)?(\d+)(?:g(\d+)(z)?)?", text.strip().lower())
    bits = int(match[2]) if match else 0
    if not match or (bits != 32 and not 1 <= bits <= 16) or (match[1] and bits not in (4, 8, 16, 32)):
        raise ValueError(
            f"{text!r} is not a number format; use 1 to 16 or 32 (bits), fp8, fp4, or groups as in 4g128 and 4g128z"
        )
    group = int(match[3]) if match[3] else 0
    if match[3] and group < 1:
        raise ValueError(f"{text!r}: the group size must be at least 1")
    is_float, group_values = bool(match[1]) or bits >= 9, 2 if match[4] else 1
    return NumberFormat(text.strip().lower(), bits, is_float, group, SCALE_BITS * group_values if group else 0)


def number_format(precision: str) -> NumberFormat:
    """The number format of a dtype.

    Raises:
        ValueError: an unknown dtype.
    """
    return parse_format(look_up(DTYPES, precision, "dtype"))


def compute_class(a: NumberFormat, b: NumberFormat) -> str:
    """Format class in which two operands multiply: the narrowest that represents both exactly.

    Weights of 4 bits with activations of 16 are multiplied in 16 bits: quantised storage alone raises no peak (paper,
    section 3.1.1).
    """
    wide = max(a.bits, b.bits)
    if wide > 16:
        return "fp32"
    if wide > 8:
        return "fp16"
    if a.is_float and b.is_float:
        return "fp8" if wide > 4 else "fp4"
    if not a.is_float and not b.is_float:
        return "int8" if wide > 4 else "int4"
    integer = b if a.is_float else a
    return "fp8" if integer.bits <= 4 else "fp16"


def is_converted(weights: NumberFormat, activations: NumberFormat) -> bool:
    """Whether weights of few bits are widened before they are multiplied with these activations."""
    return weights.bits <= 8 and compute_class(weights, activations) == "fp16"


WIDER_CLASSES: Mapping[str, tuple[str, ...]] = {
    "fp4": ("fp4", "fp8", "fp16", "fp32", "any"),
    "int4": ("int4", "int8", "fp16", "fp32", "any"),
    "fp8": ("fp8", "fp16", "fp32", "any"),
    "int8": ("int8", "fp16", "fp32", "any"),
    "fp16": ("fp16", "fp32", "any"),
    "fp32": ("fp32", "any"),
}
"""The classes that can compute each class, best first: hardware that lacks a class uses the next wider one."""

HALF_PRECISION = parse_format("16")
"""FP16 or BF16, the default format."""
