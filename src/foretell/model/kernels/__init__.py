"""CPU kernels of the decoder, compiled on first use: close to memory bandwidth, and batch-invariant bit for bit."""

from foretell.model.kernels.build import available, load, unavailable_reason
from foretell.model.kernels.drafts import BlockDraftWeights, EagleWeights, NativeBlockDrafts, NativeEagle
from foretell.model.kernels.dynamic_tree import DynamicTrees, NodeLimits, Noise
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.mlp_speculator import NativeStage, NativeStages
from foretell.model.kernels.row_ops import argmax, rms_norm, runs_on, topk, topk_softmax
from foretell.model.kernels.sampler import gumbel_noise, kept_tokens, sample
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.structures import Precision

__all__ = [
    "BlockDraftWeights",
    "DynamicTrees",
    "EagleWeights",
    "NativeBlockDrafts",
    "NativeEagle",
    "NativeLinear",
    "NativeStack",
    "NativeStage",
    "NativeStages",
    "NodeLimits",
    "Noise",
    "Precision",
    "argmax",
    "available",
    "gumbel_noise",
    "kept_tokens",
    "load",
    "rms_norm",
    "runs_on",
    "sample",
    "topk",
    "topk_softmax",
    "unavailable_reason",
]
