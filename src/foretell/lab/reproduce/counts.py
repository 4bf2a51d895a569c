"""What passes gave, per prompt, and their totals over prompts that are drawn again (bootstrap)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from foretell.engine.request import Completion
from foretell.utils.validation import FrozenModel

Samples: TypeAlias = Float[np.ndarray, " s"]
"""A quantity of every sample of prompts; the first sample is the prompts themselves."""
_SAMPLES = 4000


class Counts(FrozenModel):
    """Sums over the answers to one prompt, of passes after the prompt's own."""

    tokens: int
    passes: int
    drafting: int
    """Passes that had drafts."""
    drafted: int
    accepted: tuple[int, ...]
    """Passes that accepted a draft at depth 1, 2, …"""

    @staticmethod
    def of(answers: Sequence[Completion]) -> "Counts":
        """Of the answers to one prompt."""
        statistics = [c.statistics for c in answers]
        accepted = zip_longest(*(s.accepted_per_position for s in statistics), fillvalue=0)
        return Counts(
            tokens=sum(s.new_tokens for s in statistics) - len(answers),
            passes=sum(s.target_passes for s in statistics) - len(answers),
            drafting=sum(s.drafting_passes for s in statistics),
            drafted=sum(s.drafted for s in statistics),
            accepted=tuple(map(sum, accepted)),
        )


@dataclass(frozen=True)
class Totals:
    """Counts of a run, summed over the prompts of every sample."""

    tokens: Samples
    passes: Samples
    drafting: Samples
    drafted: Samples
    first: Samples
    """Passes that accepted a draft at depth 1."""

    @staticmethod
    def of(prompts: Sequence[Counts], weights: Float[np.ndarray, "s p"]) -> "Totals":
        """`weights`: how often each sample has each prompt."""
        columns = [(c.tokens, c.passes, c.drafting, c.drafted, c.accepted[0] if c.accepted else 0) for c in prompts]
        tokens, passes, drafting, drafted, first = (weights @ np.array(columns, float)).T
        return Totals(tokens, passes, drafting, drafted, first)

    @property
    def per_pass(self) -> Samples:
        """Tokens per pass, the target's own included; 1 without passes."""
        return np.where(self.passes > 0, self.tokens / np.maximum(self.passes, 1), 1.0)

    @property
    def acceptance(self) -> Samples:
        """Share of the passes with drafts that accept their first; 0 without any."""
        return np.asarray(self.first / np.maximum(self.drafting, 1))

    def gain(self, share: float) -> Samples:
        """Speed-up where a drafted token costs a `share` of a pass, and a pass costs the same for all its tokens."""
        return np.asarray(self.tokens / np.maximum(self.passes + share * self.drafted, 1))


def bootstrap(prompts: int) -> Float[np.ndarray, "s p"]:
    """How often each sample has each prompt: the prompts themselves, then draws with replacement."""
    drawn = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), _SAMPLES)
    return np.concatenate([np.ones((1, prompts)), drawn]).astype(float)
