"""Tells drafters that do not fit their target from what the first answers accept; no pass is made for it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foretell.core.context import Context, StepResult

PASSES, FIRST_PASSES = 64, 24
"""Passes with drafts after which a drafter is judged, and from which on one is of which hardly any draft was accepted:
at most one of 24 is, of a drafter that is right three times in ten, in two of a thousand cases.
"""
_HARDLY_ANY = 0.05
"""Accepted drafts per pass below which a drafter does not fit: a guess at random gives less, a trained one ten times
this.
"""
_LEAST_SHARE = 0.2
"""Share of the expected drafts per pass below which other texts than those of the expectation do not explain the
difference: an EAGLE-3 drafter keeps 4.8 drafts per pass of a list of numbers and 1.1 of a story.
"""


@dataclass
class DrafterCheck:
    """Judges a drafter once, by its first passes, and switches it off where it does not fit.

    The first answers cost nothing, so there are no prompts of our own. A few per cent cannot be told in this way: 64
    passes know the mean to about a tenth of a draft.
    """

    name: str
    """Of the drafter."""
    tell: Callable[[str], None]
    """Takes the sentence about a drafter that does not fit."""
    keep: Callable[[float], None] = lambda drafts: None
    """Takes the accepted drafts per pass of one that fits."""
    expected: float | None = None
    """Accepted drafts per pass; None: unknown."""
    origin: str = ""
    """Where `expected` comes from."""
    fits: bool = field(default=True, init=False)
    _passes: int = field(default=0, init=False)
    _accepted: int = field(default=0, init=False)

    def stops(self, context: Context, same_seed: bool) -> bool:
        """Whether to draft nothing for these requests. `same_seed`: the text of a seed is the same without drafts."""
        return not self.fits and (same_seed or all(p.temperature == 0 for p in context.sampling_params))

    @property
    def undecided(self) -> bool:
        """Whether it may be one of which hardly any draft is accepted, and more passes would tell."""
        return self.fits and self._passes < PASSES and self._accepted < _HARDLY_ANY * max(FIRST_PASSES, self._passes)

    def observe(self, step: StepResult) -> None:
        """Count what a pass accepted."""
        if step.tree.is_decode:
            for drafted, path in zip(step.tree.drafted_counts, step.paths, strict=True):
                if drafted:
                    self.count(len(path) - 1)

    def count(self, accepted: int) -> None:
        """Count a pass with drafts of one request, of which so many are the target's own tokens."""
        if self._passes >= PASSES or not self.fits:
            return
        self._passes += 1
        self._accepted += accepted
        if self._passes >= FIRST_PASSES:
            self._judge(self._accepted / self._passes)

    def _judge(self, drafts: float) -> None:
        if drafts < _HARDLY_ANY:
            self._refuse(
                f"{self._accepted} drafts were accepted in {self._passes} passes: it is for another target, or reads "
                "other hidden layers or another vocabulary than it was trained with"
            )
        elif self._passes < PASSES:
            return
        elif self.expected is not None and drafts < _LEAST_SHARE * self.expected:
            self._refuse(
                f"{drafts:.2f} drafts are accepted per pass, and {self.expected:.2f} by {self.origin}: it or the "
                "target has changed, or the texts are of another kind than it was trained on"
            )
        else:
            self.keep(drafts)

    def _refuse(self, reason: str) -> None:
        self.fits = False
        self.tell(f"{self.name}: {reason}; drafting is off, and answers stay those of the target")
