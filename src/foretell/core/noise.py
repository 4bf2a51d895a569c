"""The target's noise, which drafters may know: drafts that are ranked with the noise that the target will sample with
are accepted more often (Daliri et al., arXiv 2408.07978).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt64

from foretell.core.context import Context
from foretell.core.sampling import SamplingParams


@dataclass(frozen=True)
class TargetNoise:
    """How the target samples after nodes of every level below the roots."""

    sampling_params: tuple[SamplingParams, ...]
    """Per request; at temperature 0 it does not sample."""
    key: UInt64[np.ndarray, "b n"]
    """Of the noise of all tokens at each level; see `exponential_variates`."""

    def at(self, level: int, frontier: Int[np.ndarray, "b f"]) -> "LevelNoise":
        """The noise after these nodes, which lie at one level."""
        return LevelNoise(self.sampling_params, self.key[:, level], frontier)


@dataclass(frozen=True)
class LevelNoise:
    """How the target samples after the nodes `frontier`, which lie at one level."""

    sampling_params: tuple[SamplingParams, ...]
    key: UInt64[np.ndarray, " b"]
    frontier: Int[np.ndarray, "b f"]


def target_noise(context: Context, depth: int) -> TargetNoise | None:
    """The noise of the first `depth` levels below the roots; None where no request is drafted for with noise."""
    if not context.coupled or not depth:
        return None
    if not any(s.temperature for s in context.sampling_params):
        return None
    pairs = zip(context.rngs, context.sequences, strict=True)
    keys = [[rng.key(sequence.length + level) for level in range(depth)] for rng, sequence in pairs]
    return TargetNoise(context.sampling_params, np.array(keys, np.uint64))
