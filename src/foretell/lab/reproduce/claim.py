"""What a claim is, and what checking it finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from foretell.lab.reproduce.lab import Lab

Verdict = Literal["holds", "does not hold", "not checked"]


@dataclass(frozen=True)
class Series:
    """A line of a picture."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @staticmethod
    def of(label: str, points: Sequence[tuple[float, float]]) -> "Series":
        """From points."""
        return Series(label, tuple(float(x) for x, _ in points), tuple(float(y) for _, y in points))


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    holds: bool
    summary: str
    """What was measured, in a sentence."""
    series: tuple[Series, ...]
    x: str
    """What the horizontal axis shows."""
    y: str = "tokens per pass"
    reason: str = ""
    """Where the claim does not hold: why."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim about a method of the catalogue."""

    method: str
    statement: str
    """The claim, without what depends on hardware."""
    criterion: str
    """When it counts as holding here, with the tolerance."""
    check: Callable[["Lab"], Finding]
    """Raises ValueError where something is missing that the method needs."""


def rises(values: Sequence[float], slack: float) -> bool:
    """Whether no value is lower than the one before by more than a share `slack` of it."""
    return all(b >= a * (1 - slack) for a, b in pairwise(values))


def percent(value: float) -> str:
    """A share in words."""
    return f"{100 * value:.0f} %"
