"""Chains whose length follows how well the last ones did."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import Exclusive
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape
from foretell.shape.chain import Chain, ChainLimits, grow_chains


@dataclass(frozen=True)
class ChainHistory:
    """A text's present pace and how its chains did so far: `acceptance` is a running mean share of accepted drafts."""

    limits: ChainLimits
    acceptance: float = 0.0


class LengthRule(ABC):
    """How a chain's pace follows from what became of the one before."""

    @abstractmethod
    def after(self, record: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """The record after a chain of `drafted` tokens (1 or more) of which `accepted` stood."""


@dataclass(frozen=True)
class HeuristicSchedule(LengthRule):
    """Hugging Face's `heuristic` schedule: `up` tokens more after a full chain was accepted, `down` fewer (at least
    one) after any other.
    """

    up: int = 2
    down: int = 1
    most: int = 64

    def after(self, record: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """Lengthen or shorten."""
        pace = record.limits
        length = min(self.most, pace.length + self.up) if accepted == pace.length else max(1, pace.length - self.down)
        return replace(record, limits=replace(pace, length=length))


@dataclass(frozen=True)
class ConfidenceRule(LengthRule):
    """Draft & Verify's adaptive exit (arXiv 2309.08168): the confidence to stop at moves towards a wanted acceptance.

    It rises by `step` (smoothed by `inertia`) while the running acceptance (smoothed by `memory`) is at most `wanted`,
    and falls otherwise, unless the chain had reached its full length, as in the released code.
    """

    wanted: float = 0.9
    step: float = 0.01
    memory: float = 0.5
    inertia: float = 0.9

    def after(self, record: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """Move the confidence."""
        pace = record.limits
        acceptance = self.memory * record.acceptance + (1 - self.memory) * accepted / drafted
        way = 1 if acceptance <= self.wanted else 0 if drafted == pace.length else -1
        aim = pace.confidence + way * self.step
        confidence = self.inertia * pace.confidence + (1 - self.inertia) * aim
        return ChainHistory(replace(pace, confidence=confidence), acceptance)


class AdaptiveChain(Exclusive, Shape[Predictor]):
    """A chain that starts at the pace of `start` and changes it by `rule`, per text.

    The pace depends on earlier steps only, never on what the target says of the present chain, so every acceptor keeps
    its law.
    """

    label = "adaptive chain"

    needs = Predictor

    def __init__(self, start: Chain, rule: LengthRule) -> None:
        self.start, self.rule = start, rule
        self._records: dict[int, ChainHistory] = {}
        self._grown: set[int] = set()

    def record(self, row: int) -> ChainHistory:
        """The present state of a text."""
        return self._records.get(row, ChainHistory(self.start.limits))

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A chain per text at its own pace."""
        self._grown = set(context.rows)
        return grow_chains(draft, context, [self.record(row).limits for row in context.rows], self.start.draw)

    def observe(self, step: StepResult) -> None:
        """Learn how the chains did."""
        for i, row in enumerate(step.context.rows):
            prefix_length = int(step.tree.prefix_length[i])
            drafted = int(step.tree.valid[i].sum()) - prefix_length
            if row in self._grown and drafted:
                self._records[row] = self.rule.after(self.record(row), drafted, len(step.paths[i]) - prefix_length)
        self._grown = set()

    def release(self, row: int) -> None:
        """Forget a row."""
        self._records.pop(row, None)
