"""Chains whose limits adapt to the acceptance of earlier chains."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from foretell.core.context import Context, StepResult, StepState, TokenBuffer
from foretell.core.engine_bound import EngineBound
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape
from foretell.shape.chain import Chain, ChainLimits, grow_chains


@dataclass(frozen=True)
class ChainHistory:
    """One request's present limits; `acceptance`: running mean of the share of drafts that are accepted."""

    limits: ChainLimits
    acceptance: float = 0.0


class LengthRule(ABC):
    """How the limits of a chain follow from the acceptance of the chain before."""

    @abstractmethod
    def update(self, history: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """The history after a chain of `drafted` tokens (1 or more) of which `accepted` were accepted."""


@dataclass(frozen=True)
class HeuristicSchedule(LengthRule):
    """Hugging Face's `heuristic` schedule: `increase` more tokens after a chain of full length was accepted, `decrease`
    fewer (at least one) after any other.
    """

    increase: int = 2
    decrease: int = 1
    max_length: int = 64

    def update(self, history: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """Lengthen or shorten the chain."""
        length = history.limits.length
        all_accepted = accepted == length
        new = min(self.max_length, length + self.increase) if all_accepted else max(1, length - self.decrease)
        return replace(history, limits=replace(history.limits, length=new))


@dataclass(frozen=True)
class ConfidenceRule(LengthRule):
    """Draft & Verify's adaptive exit (arXiv 2309.08168): moves the confidence threshold towards a target acceptance.

    The threshold rises by `step` (smoothed by `confidence_momentum`) while the mean acceptance (smoothed by
    `acceptance_momentum`) is at most `target_acceptance`. Otherwise it falls, unless the chain had its full length, as
    in the released code.
    """

    target_acceptance: float = 0.9
    step: float = 0.01
    acceptance_momentum: float = 0.5
    confidence_momentum: float = 0.9

    def update(self, history: ChainHistory, drafted: int, accepted: int) -> ChainHistory:
        """Move the confidence threshold."""
        limits, momentum = history.limits, self.confidence_momentum
        acceptance = self.acceptance_momentum * history.acceptance + (1 - self.acceptance_momentum) * accepted / drafted
        direction = 1 if acceptance <= self.target_acceptance else 0 if drafted == limits.length else -1
        aim = limits.confidence + direction * self.step
        confidence = momentum * limits.confidence + (1 - momentum) * aim
        return ChainHistory(replace(limits, confidence=confidence), acceptance)


class AdaptiveChain(EngineBound, Shape[Predictor]):
    """A chain whose limits start at those of `start` and are updated by `rule`, per request.

    The limits depend on earlier steps only, never on the target's output for the present chain, so every lossless
    acceptor stays lossless. They do not follow from the text, so they are kept by sequence: a request that is paused or
    preempted goes on with its own.
    """

    label = "adaptive chain"

    drafter_type = Predictor

    def __init__(self, start: Chain, rule: LengthRule) -> None:
        self.start, self.rule = start, rule
        self._histories = WeakKeyDictionary[TokenBuffer, ChainHistory]()
        self._drafted_rows = StepState[tuple[int, ...]]()

    def history(self, text: TokenBuffer) -> ChainHistory:
        """The present state of a request."""
        return self._histories.get(text, ChainHistory(self.start.limits))

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A chain for each request with its present limits."""
        self._drafted_rows.put(context, context.rows)
        return grow_chains(draft, context, [self.history(text).limits for text in context.sequences], self.start.draw)

    def observe(self, step: StepResult) -> None:
        """Update the limits of the rows that drafted."""
        rows = self._drafted_rows.of(step.context, ())
        for i, (row, text) in enumerate(zip(step.context.rows, step.context.sequences, strict=True)):
            drafted = step.num_drafted(i)
            if row in rows and drafted:
                self._histories[text] = self.rule.update(self.history(text), drafted, step.num_accepted(i))
