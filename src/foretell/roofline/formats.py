"""Number formats: how many bytes an element takes with its quantisation metadata, and what format it is multiplied
in.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SCALE_BITS = 16


@dataclass(frozen=True)
class Format:
    """A storage format: `bits` per element; floating point or integer; per group of `group` elements `group_bits` of
    metadata.
    """

    name: str
    bits: float
    floating: bool
    group: int = 0
    group_bits: int = 0

    @property
    def bytes(self) -> float:
        """Bytes per element, scales and zero points of the group included."""
        return (self.bits + (self.group_bits / self.group if self.group else 0.0)) / 8


def parse(text: str) -> Format:
    """Read a format: `16`, `32`, `fp8`, `fp4`, integers `1` to `8`, and `4g128` (one 16-bit scale per 128) or `4g128z`
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
    floating = bool(match[1]) or bits >= 9
    return Format(text.strip().lower(), bits, floating, group, SCALE_BITS * (2 if match[4] else 1) if group else 0)


def multiplied_as(a: Format, b: Format) -> str:
    """Format class in which two operands meet: both are converted to the narrowest class that holds them exactly.

    Weights of 4 bits with activations of 16 are multiplied in 16 bits: quantised storage alone raises no peak (paper,
    section 3.1.1).
    """
    wide = max(a.bits, b.bits)
    if wide > 16:
        return "fp32"
    if wide > 8:
        return "fp16"
    if a.floating and b.floating:
        return "fp8" if wide > 4 else "fp4"
    if not a.floating and not b.floating:
        return "int8" if wide > 4 else "int4"
    integer = b if a.floating else a
    return "fp8" if integer.bits <= 4 else "fp16"


LADDER: Mapping[str, tuple[str, ...]] = {
    "fp4": ("fp4", "fp8", "fp16", "fp32", "any"),
    "int4": ("int4", "int8", "fp16", "fp32", "any"),
    "fp8": ("fp8", "fp16", "fp32", "any"),
    "int8": ("int8", "fp16", "fp32", "any"),
    "fp16": ("fp16", "fp32", "any"),
    "fp32": ("fp32", "any"),
}
"""Class wanted to the classes that can stand in for it, best first: what the hardware cannot multiply is widened."""

SIXTEEN = parse("16")
"""Half precision, the default of everything."""
