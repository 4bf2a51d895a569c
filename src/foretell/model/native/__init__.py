"""CPU kernels of the decoder, compiled on first use: near the memory floor, and bitwise independent of who shares a call."""

from foretell.model.native.build import available, load, why_not
from foretell.model.native.eagle import NativeEagle, Surroundings
from foretell.model.native.stack import (
    NativeLinear,
    NativeStack,
    NativeStage,
    argmax,
    likeliest,
    rms_norm,
    topk,
)
from foretell.model.native.structures import Precision

__all__ = [
    "NativeEagle",
    "NativeLinear",
    "NativeStack",
    "NativeStage",
    "Precision",
    "Surroundings",
    "argmax",
    "available",
    "likeliest",
    "load",
    "rms_norm",
    "topk",
    "why_not",
]
