"""What is known of a drafter: how far its drafts are accepted, and whether it is asked."""

from dataclasses import dataclass

from foretell.engine.acceptance import Acceptance
from foretell.engine.pass_times import Key


@dataclass
class Trials:
    """Of a drafter at one load."""

    on: bool = True
    next: int = 0
    """Step of the next look whether a trial may be."""
    since: int = 0
    """Step of the last trial, or of switching."""
    left: int = 0
    """Steps of the present trial that are left."""
    forced: int = 0
    """Drafts that it verifies beyond those that pay."""
    until: int = 0
    """Step until which it stays off without another look."""


class DraftSource:
    """What is known of one drafter of a method: how far its drafts are accepted, and where it is tried."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.levels = name, 0, 1.0
        """Steps in which it drafted, and mean levels of its trees."""
        self.scored, self.reading = True, f"{name} reading"
        """Whether its trees have scores, and the name of the times of its reading."""
        self._acceptance = dict[tuple[bool, bool], Acceptance]()
        self.trials = dict[Key, Trials]()

    def acceptance(self, sampled: bool) -> Acceptance:
        """Of its drafts as they were last (with scores or without), for sampled or greedy requests."""
        key = sampled, self.scored
        if key not in self._acceptance:
            self._acceptance[key] = Acceptance(self.scored)
        return self._acceptance[key]
