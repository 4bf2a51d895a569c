"""The target's noise, which drafters may know: drafts that are ranked with the noise that the target will sample with
are accepted more often (Daliri et al., arXiv 2408.07978).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt64

from foretell.core.context import Context
from foretell.core.sampling import exponential_variates

NOISE_CANDIDATES = 32
"""Most probable children of a node that are ranked with the noise."""
_NOISE_SHARE = 0.75
"""Weight of the noise in units of the temperature, fitted to the shipped speculators: with 1, a drafter would have to
predict the target's logits without error.
"""


@dataclass(frozen=True)
class TargetNoise:
    """The noise that the target samples with after nodes of every level, and the weight that drafters give it."""

    key: UInt64[np.ndarray, "b n"]
    """Of the noise of all tokens at each level below the root; see `exponential_variates`."""
    scale: Float[np.ndarray, " b"]
    """Factor on the Gumbel noise that is added to the drafter's log-probabilities; 0: a request without noise."""

    def rank(
        self, row: int, level: int, probability: Float[np.ndarray, " c"], token: Int[np.ndarray, " c"]
    ) -> tuple[Float[np.ndarray, " c"], Int[np.ndarray, " c"]]:
        """Candidates for the child of a node at `level`, given their probabilities without the noise: the most probable
        first, with the noise.
        """
        if not self.scale[row]:
            return probability, token
        noise = -np.log(exponential_variates(int(self.key[row, level]), token))
        score = np.log(np.maximum(probability, np.finfo(np.float64).tiny)) + self.scale[row] * noise
        chance = np.exp(score - score.max())
        order = np.argsort(-chance, kind="stable")
        return chance[order] / chance.sum() * probability.sum(), token[order]


def target_noise(context: Context, depth: int) -> TargetNoise | None:
    """The noise of the first `depth` levels below the roots; None where no request is drafted for with noise."""
    if not context.coupled or not depth:
        return None
    if not any(s.temperature for s in context.sampling_params):
        return None
    scale = np.array([_NOISE_SHARE * s.temperature for s in context.sampling_params])
    pairs = zip(context.rngs, context.sequences, strict=True)
    keys = [[rng.key(sequence.length + level) for level in range(depth)] for rng, sequence in pairs]
    return TargetNoise(np.array(keys, np.uint64), scale)


def noise_for_kernels(
    context: Context, depth: int
) -> tuple[UInt64[np.ndarray, "b n"], Float[np.ndarray, " b"], int] | None:
    """The same as `kernels.DynamicTrees` takes it."""
    noise = target_noise(context, depth)
    return None if noise is None else (noise.key, noise.scale, NOISE_CANDIDATES)
