"""What is known of a drafter: how far its drafts are accepted, and whether it is asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from foretell.engine.acceptance import Acceptance
from foretell.engine.tuning import (
    COSTLY_INTERVAL,
    FIRST_STEPS,
    HORIZON,
    MOST_OFF_STEPS,
    OFF_STEPS,
    TRIAL_INTERVAL,
    TRIAL_SHARE,
    TRIAL_STEPS,
)


@dataclass
class Trials:
    """Whether a drafter is asked at one load, and the short trials of one that does not pay."""

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
    _pause: int = OFF_STEPS
    """Steps without a look after the next one."""

    def rests(self, step: int) -> bool:
        """Whether it stays off in this step without another look."""
        return not self.on and not self.left and step < min(self.until, self.next)

    def switch(self, on: bool, step: int) -> None:
        """Ask it from this step on, or ask it no longer."""
        self.on, self.left, self.since, self.next, self._pause = on, 0, step, step + TRIAL_INTERVAL, OFF_STEPS

    def rest(self, step: int) -> None:
        """Leave it off for the next steps: for twice as many each time."""
        self.until, self._pause = step + self._pause, min(2 * self._pause, MOST_OFF_STEPS)

    def begin(self, step: int, share: float, forced: int, steps: int = TRIAL_STEPS) -> bool:
        """Begin a trial of so many steps that lose this share of a plain step each. False: it would come too often."""
        earliest = self.since + max(COSTLY_INTERVAL if forced else 0, int(steps * share / TRIAL_SHARE))
        if step < earliest:
            self.next = min(max(earliest, step + TRIAL_INTERVAL), step + MOST_OFF_STEPS)
            return False
        self.left, self.since, self.forced, self.next = steps, step, forced, step + TRIAL_INTERVAL
        return True


class DraftSource:
    """What is known of one drafter of a method, whoever uses it: what it offers, and how far that is accepted."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.levels = name, 0, 1.0
        """Steps in which it drafted, and mean levels of its trees."""
        self.scored, self.reading, self.reads = True, f"{name} reading", False
        """Whether its trees have scores, the name of the times of its reading, and whether it has to read texts."""
        self._acceptance = dict[tuple[bool, bool], Acceptance]()

    @property
    def is_new(self) -> bool:
        """Whether it has drafted in too few steps for its times to decide."""
        return self.steps < FIRST_STEPS

    def acceptance(self, sampled: bool) -> Acceptance:
        """Of its drafts as they were last (with scores or without), for sampled or greedy requests."""
        key = sampled, self.scored
        if key not in self._acceptance:
            self._acceptance[key] = Acceptance(self.scored)
        return self._acceptance[key]

    def count(self, levels: int) -> None:
        """Count a step whose deepest tree has so many levels."""
        self.steps += 1
        self.levels += (levels - self.levels) / min(self.steps, HORIZON)

    def state(self) -> dict[str, Any]:
        """What `from_state` reads."""
        kinds = [[*key, known.state()] for key, known in self._acceptance.items()]
        return {"scored": self.scored, "steps": self.steps, "levels": round(self.levels, 3), "acceptance": kinds}

    @staticmethod
    def from_state(name: str, state: Mapping[str, Any]) -> "DraftSource":
        """What an earlier process has left.

        Raises:
            ValueError, TypeError, KeyError: something else.
        """
        source = DraftSource(name)
        source.scored, source.steps, source.levels = bool(state["scored"]), int(state["steps"]), float(state["levels"])
        if not (source.steps >= 0 and 0 <= source.levels < inf):
            raise ValueError("counts that are none")
        for sampled, scored, known in state["acceptance"]:
            source._acceptance[bool(sampled), bool(scored)] = Acceptance.from_state(bool(scored), known)
        return source
