"""Third check: an answer does not depend on who shares the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binom

from foretell.verify.classifier import TokenDivergence, first_difference
from foretell.verify.distribution import ALPHA

_SIDES = 4
"""A decision compares the target's and the draft's numbers, and both may round either way."""


@dataclass(frozen=True)
class BatchInvariance:
    """The same requests alone and together: greedy ones, whose differences are judged one by one, and sampled ones with
    their seeds.
    """

    greedy: int
    sampled: int
    rows: int
    """Most requests that ran together."""
    divergences: tuple[TokenDivergence, ...]
    sampled_differences: int
    p_value: float
    """Chance that rounding alone parts as many sampled answers or more; 0 where readings are exact and any differ."""

    @property
    def passed(self) -> bool:
        """Nothing differs beyond ties and rounding."""
        return all(d.verdict == "tie" for d in self.divergences) and self.p_value >= ALPHA


def rounding_explains(
    alone: Sequence[Sequence[int]], together: Sequence[Sequence[int]], noise: float
) -> tuple[int, float]:
    """How many sampled answers differ, and the chance of as many where each token's distribution is blurred by `noise`
    (total variation).
    """
    differ = sum(first_difference(a, b) is not None for a, b in zip(alone, together, strict=True))
    longest = max((len(a) for a in alone), default=0)
    share = 1 - (1 - min(1.0, _SIDES * noise)) ** longest
    return differ, float(binom.sf(differ - 1, len(alone), share)) if differ else 1.0
