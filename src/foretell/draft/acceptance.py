"""How often guesses of a kind were right: the running estimate by which retrievers rank and bound what they offer."""

from collections.abc import Sequence


class AcceptanceEstimator:
    """Conditional acceptance rates of several kinds of guesses (match lengths, ranks), learned while decoding.

    Starts from `prior` rates worth `weight` observations each; old observations fade by `fade` per new one of the same
    kind.
    """

    def __init__(self, prior: Sequence[float], weight: float = 8.0, decay: float = 0.97) -> None:
        self._hits = [p * weight for p in prior]
        self._seen = [weight] * len(prior)
        self._fade = decay

    def rate(self, kind: int) -> float:
        """Estimated probability that a guess of this kind is right, given that what it follows was."""
        kind = min(kind, len(self._seen) - 1)
        return self._hits[kind] / self._seen[kind]

    def update(self, kind: int, right: bool) -> None:
        """Count one guess whose predecessors were right."""
        kind = min(kind, len(self._seen) - 1)
        self._hits[kind] = self._hits[kind] * self._fade + right
        self._seen[kind] = self._seen[kind] * self._fade + 1.0

    def cumulative(self, kind: int, length: int) -> tuple[float, ...]:
        """Probabilities that the first, first two, … of `length` guesses of one kind are right."""
        rate, product, out = self.rate(kind), 1.0, []
        for _ in range(length):
            product *= rate
            out.append(product)
        return tuple(out)

    def update_run(self, kind: int, guessed: Sequence[int], decided: Sequence[int]) -> None:
        """Count a run of guesses against what was decided: right ones up to the first wrong one."""
        for guess, truth in zip(guessed, decided, strict=False):
            self.update(kind, guess == truth)
            if guess != truth:
                return
