"""CPU kernels of the decoder, compiled on first use: near the memory floor, and bitwise independent of who shares a call."""

from foretell.model.native.beam import Trees
from foretell.model.native.build import available, load, why_not
from foretell.model.native.eagle import NativeEagle, Surroundings
from foretell.model.native.linear import NativeLinear
from foretell.model.native.rows import argmax, likeliest, rms_norm, topk
from foretell.model.native.stack import NativeStack
from foretell.model.native.stages import NativeStage, NativeStages
from foretell.model.native.structures import Precision

__all__ = [
    "NativeEagle",
    "NativeLinear",
    "NativeStack",
    "NativeStage",
    "NativeStages",
    "Precision",
    "Surroundings",
    "Trees",
    "argmax",
    "available",
    "likeliest",
    "load",
    "rms_norm",
    "topk",
    "why_not",
]
