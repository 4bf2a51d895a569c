"""Running estimates of acceptance rates, by which retrievers rank their continuations."""

from abc import abstractmethod
from collections.abc import Sequence

from foretell.core.context import Context, StepResult, StepState
from foretell.draft.base import Continuation, Retriever

Candidate = tuple[int, tuple[int, ...]]
"""The kind of a continuation, whose acceptance rate it has, and its tokens."""


class AcceptanceEstimator:
    """Conditional acceptance rates of several kinds of drafts (match lengths, ranks), updated while decoding.

    The `prior` rates count as `weight` observations each; the weight of old observations is multiplied by `decay` per
    new observation of the same kind.
    """

    def __init__(self, prior: Sequence[float], weight: float = 8.0, decay: float = 0.97) -> None:
        self._accepted = [p * weight for p in prior]
        self._observed = [weight] * len(prior)
        self._decay = decay

    def rate(self, kind: int) -> float:
        """Estimated probability that a token of this kind is accepted if its predecessors are."""
        kind = min(kind, len(self._observed) - 1)
        return self._accepted[kind] / self._observed[kind]

    def update(self, kind: int, accepted: bool) -> None:
        """Count one token whose predecessors were accepted."""
        kind = min(kind, len(self._observed) - 1)
        self._accepted[kind] = self._accepted[kind] * self._decay + accepted
        self._observed[kind] = self._observed[kind] * self._decay + 1.0

    def update_each(self, right: int) -> None:
        """Count one token of every kind, of which that of the kind `right` alone was accepted."""
        self._accepted = [a * self._decay + (kind == right) for kind, a in enumerate(self._accepted)]
        self._observed = [o * self._decay + 1.0 for o in self._observed]

    def cumulative(self, kind: int, length: int) -> tuple[float, ...]:
        """Probabilities that the first, the first two, … of `length` tokens of one kind are accepted."""
        rate, product, out = self.rate(kind), 1.0, []
        for _ in range(length):
            product *= rate
            out.append(product)
        return tuple(out)

    def update_run(self, kind: int, drafted: Sequence[int], new_tokens: Sequence[int]) -> None:
        """Count drafted tokens against the new tokens, up to the first that differs."""
        for draft, new in zip(drafted, new_tokens, strict=False):
            self.update(kind, draft == new)
            if draft != new:
                return


class EstimatingRetriever(Retriever):
    """A retriever whose continuations have the acceptance rate of their kind, which every request learns for itself;
    `prior`: the rates before it has.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = prior
        self._estimators: dict[int, AcceptanceEstimator] = {}
        self._offered = StepState[dict[int, list[Candidate]]]()

    @abstractmethod
    def _candidates(self, context: Context, i: int, budget: int) -> list[Candidate]:
        """The continuations of request `i`, best first, of about `budget` tokens in all."""

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The continuations of every request with the rates of their kinds."""
        out, offered = list[list[Continuation]](), dict[int, list[Candidate]]()
        for i, row in enumerate(context.rows):
            offered[row] = self._candidates(context, i, budget)
            rates = self._estimators.setdefault(row, AcceptanceEstimator(self._prior))
            out.append([Continuation(tokens, rates.cumulative(kind, len(tokens))) for kind, tokens in offered[row]])
        self._offered.put(context, offered)
        return out

    def observe(self, step: StepResult) -> None:
        """Update the acceptance rates."""
        offered = self._offered.of(step.context, {})
        for row, decided in zip(step.context.rows, step.new_tokens, strict=True):
            for kind, tokens in offered.get(row, ()):
                self._estimators[row].update_run(kind, tokens, decided)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._estimators.pop(row, None)
