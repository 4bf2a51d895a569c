"""Chains whose length follows how well the last ones did."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import EngineBound
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
    def update(self, history: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """The record after a chain of `drafted` tokens (1 or more) of which `accepted` stood."""


@dataclass(frozen=True)
class HeuristicSchedule(LengthRule):
    """Hugging Face's `heuristic` schedule: `up` tokens more after a full chain was accepted, `down` fewer (at least
    one) after any other.
    """

    increase: int = 2
    decrease: int = 1
    max_length: int = 64

    def update(self, history: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """Lengthen or shorten."""
        limits = history.limits
        length = min(self.max_length, limits.length + self.increase) if accepted == limits.length else max(1, limits.length - self.decrease)
        return replace(history, limits=replace(limits, length=length))


@dataclass(frozen=True)
class ConfidenceRule(LengthRule):
    """Draft & Verify's adaptive exit (arXiv 2309.08168): the confidence to stop at moves towards a wanted acceptance.

    It rises by `step` (smoothed by `inertia`) while the running acceptance (smoothed by `memory`) is at most `wanted`,
    and falls otherwise, unless the chain had reached its full length, as in the released code.
    """

    target_acceptance: float = 0.9
    step: float = 0.01
    acceptance_momentum: float = 0.5
    confidence_momentum: float = 0.9

    def update(self, history: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """Move the confidence."""
        limits = history.limits
        acceptance = self.acceptance_momentum * history.acceptance + (1 - self.acceptance_momentum) * accepted / drafted
        way = 1 if acceptance <= self.target_acceptance else 0 if drafted == limits.length else -1
        aim = limits.confidence + way * self.step
        confidence = self.confidence_momentum * limits.confidence + (1 - self.confidence_momentum) * aim
        return ChainHistory(replace(limits, confidence=confidence), acceptance)


class AdaptiveChain(EngineBound, Shape[Predictor]):
    """A chain that starts at the pace of `start` and changes it by `rule`, per text.

    The pace depends on earlier steps only, never on what the target says of the present chain, so every acceptor keeps
    its law.
    """

    label = "adaptive chain"

    drafter_type = Predictor

    def __init__(self, start: Chain, rule: LengthRule) -> None:
        self.start, self.rule = start, rule
        self._histories: dict[int, ChainHistory] = {}
        self._drafted_rows: set[int] = set()

    def history(self, row: int) -> ChainHistory:
        """The present state of a text."""
        return self._histories.get(row, ChainHistory(self.start.limits))

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A chain per text at its own pace."""
        self._drafted_rows = set(context.rows)
        return grow_chains(draft, context, [self.history(row).limits for row in context.rows], self.start.draw)

    def observe(self, step: StepResult) -> None:
        """Learn how the chains did."""
        for i, row in enumerate(step.context.rows):
            prefix_length = int(step.tree.prefix_length[i])
            drafted = int(step.tree.valid[i].sum()) - prefix_length
            if row in self._drafted_rows and drafted:
                self._histories[row] = self.rule.update(self.history(row), drafted, len(step.paths[i]) - prefix_length)
        self._drafted_rows = set()

    def release(self, row: int) -> None:
        """Forget a row."""
        self._histories.pop(row, None)
