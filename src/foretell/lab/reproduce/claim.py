"""A claim of a paper as data: what it states, how the same quantity is measured here, and what a null method gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foretell.lab.reproduce.counts import Samples, Totals

Options = Mapping[str, object] | Callable[[int], Mapping[str, object]]
"""Options of a method, or a function of the target's number of layers that gives them."""
Verdict = Literal["reproduced", "direction only", "not reproduced", "not checked"]
LEAST = 1 / 4
"""Share of the paper's effect that a direction needs at least: a large tree of permuted heads reaches a fifth."""
SPEC_BENCH = "Spec-Bench (arXiv 2401.07851), greedy, one sequence"


@dataclass(frozen=True)
class Run:
    """Answers of one method. `prompts`: which of the lab's. `repeat`: seeds per prompt. `corpus`: whether it drafts
    from modules of Python code, of which none is in the prompts. `free`: whether drafts cost no time, where
    measured times would choose them. `noise`: how much its draft model has lost of what it knows of the target's
    answers, as noise in its matrices in shares of their standard deviation.
    """

    method: str
    options: Options = field(default_factory=dict)
    prompts: Literal["mixed", "long", "code"] = "mixed"
    temperature: float = 0.0
    repeat: int = 1
    corpus: bool = False
    free: bool = False
    noise: float = 0.0

    def options_for(self, layers: int) -> Mapping[str, object]:
        """The options for a target with so many layers."""
        return self.options(layers) if callable(self.options) else self.options


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's number about a method, and the runs that measure the same quantity."""

    method: str
    paper: str
    """What the paper states, in one sentence with its number and setting."""
    published: float
    here: str
    """The quantity, and how it is measured here."""
    runs: tuple[Run, ...]
    value: Callable[[Sequence[Totals]], Samples]
    """The quantity, from the totals of the runs."""
    null: float | Callable[[Sequence[Totals]], Samples] = 1.0
    """What a method without the paper's idea gives."""
    band: tuple[float, float] = (2 / 3, 3 / 2)
    """Ratios of the effect here to the paper's that count as reproduced."""
    scale: str
    """Where the effect is smaller here: why, and what would show it."""


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Finding:
    """What a check measured. `ratio`: (here - null) / (paper - null), so that a null method has 0."""

    value: Interval
    null: float
    ratio: Interval
    prompts: int
    changed: int
    """Answers of methods that must not change a text that differ from plain decoding's."""

    def verdict(self, band: tuple[float, float]) -> Verdict:
        """Reproduced: the ratio's interval lies within the band. Direction only: it lies above `LEAST`."""
        if self.changed or self.ratio.low < LEAST:
            return "not reproduced"
        return "reproduced" if band[0] <= self.ratio.low and self.ratio.high <= band[1] else "direction only"
