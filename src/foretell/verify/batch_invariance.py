"""Third check: an answer does not depend on the other requests of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binom

from foretell.verify.classifier import TokenDivergence, first_difference
from foretell.verify.distribution import ALPHA

_DECISION_ERRORS = 4
"""Rounding errors of a decision, in units of the rounding of one distribution: the target's and the draft's, each up or
down.
"""


@dataclass(frozen=True)
class BatchInvariance:
    """The same requests alone and in a batch: greedy ones, and sampled ones with their seeds."""

    greedy: int
    sampled: int
    rows: int
    """Rows of the batch."""
    divergences: tuple[TokenDivergence, ...]
    """Of greedy answers."""
    sampled_differences: int
    """Sampled answers that differ."""
    p_value: float
    """Chance that rounding changes as many sampled answers or more; 0 where rounding is excluded and any differ."""

    @property
    def passed(self) -> bool:
        """Whether ties and rounding explain every difference."""
        return all(d.verdict == "tie" for d in self.divergences) and self.p_value >= ALPHA


def compare_sampled(
    alone: Sequence[Sequence[int]], batched: Sequence[Sequence[int]], rounding_variation: float
) -> tuple[int, float]:
    """How many sampled answers differ, and the chance of as many or more through rounding alone.

    `rounding_variation`: total variation by which rounding changes the distribution of a token.
    """
    differences = sum(first_difference(a, b) is not None for a, b in zip(alone, batched, strict=True))
    longest = max((len(a) for a in alone), default=0)
    chance = 1 - (1 - min(1.0, _DECISION_ERRORS * rounding_variation)) ** longest
    return differences, float(binom.sf(differences - 1, len(alone), chance)) if differences else 1.0
