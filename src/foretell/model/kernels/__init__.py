"""CPU kernels of the decoder, compiled on first use: near the memory floor, and bitwise independent of who shares a
call.
"""

from foretell.model.kernels.beam import Trees
from foretell.model.kernels.build import available, load, why_not
from foretell.model.kernels.eagle import NativeEagle, Surroundings
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.rows import argmax, likeliest, rms_norm, topk
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.stages import NativeStage, NativeStages
from foretell.model.kernels.structures import Precision

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
