"""What drafters offer in a step, and which of it pays: the drafts that raise the step's tokens per second."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from foretell.engine.step_costs import StepCosts


class Paying(NamedTuple):
    """Drafts that pay: their number and summed value, the rate with them, and per request number and summed chances."""

    nodes: int
    gained: float
    rate: float
    kept: dict[int, int]
    expected: dict[int, float]


class Offers:
    """The drafts that were offered in a step so far. `weights`: what a token of each request is worth."""

    def __init__(self, costs: StepCosts, weights: Sequence[float]) -> None:
        self.costs, self.weights, self.worth = costs, weights, sum(weights)
        self.spent, self.ahead = 0.0, 0.0
        """Seconds of drafting in this step, and those of reading that the drafts of later steps pay for."""
        self._values, self._chances = list[float](), dict[int, list[float]]()

    def add(self, i: int, chances: Sequence[float]) -> None:
        """Count drafts with these chances of acceptance for a request."""
        self._chances[i] = [*self._chances.get(i, ()), *chances]
        self._values += [self.weights[i] * chance for chance in chances if chance]

    @property
    def paying(self) -> Paying:
        """Those that pay."""
        if not self._values:
            return Paying(0, 0.0, self.worth / self.costs.counted(0, self.spent), {}, {})
        values = sorted(self._values, reverse=True)
        nodes, gained = self.best_of(values)
        least = values[nodes - 1] if nodes else inf
        paying = {i: [c for c in chances if c * self.weights[i] >= least] for i, chances in self._chances.items()}
        return Paying(
            nodes,
            gained,
            (self.worth + gained) / self.costs.counted(nodes, self.spent),
            {i: len(chances) for i, chances in paying.items()},
            {i: sum(chances) for i, chances in paying.items()},
        )

    def best_of(self, values: Sequence[float]) -> tuple[int, float]:
        """How many of the drafts with these falling values to verify, and their summed value."""
        best, gained, host = (0, 0.0), 0.0, self.costs.before_drafts(self.spent)
        rate = self.worth / (host + self.costs.at(0))
        for count, value in enumerate(values, 1):
            gained += value
            now = (self.worth + gained) / (host + self.costs.at(count))
            if now > rate:
                rate, best = now, (count, gained)
        return best
