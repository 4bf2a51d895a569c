"""The last measured times of one kind, and of a drafter by requests and levels."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import isfinite, log2
from typing import Any

from foretell.engine.tuning import EXPECTED_TIMES, QUANTILE, ROW_SLOPE, WINDOW

FINE = 2.0
"""Loads per factor of two in the number of requests."""
_MOST_LEVELS = 8
"""Levels of a tree that are told apart."""
_BELIEVED = 8
"""Times of a kind from which on they are believed, and told to the next start: fewer may all be disturbed."""


def load_of(requests: int) -> int:
    """The load that so many requests are."""
    return round(FINE * log2(max(1, requests)))


def requests_of(load: int) -> float:
    """Requests of a load."""
    return float(2 ** (load / FINE))


class Times:
    """The last times of one kind."""

    def __init__(self, times: Iterable[float] = ()) -> None:
        self.last = deque(times, maxlen=WINDOW)
        self._low: float | None = None
        if not all(isfinite(time) for time in self.last):
            raise ValueError("a time that is no number")

    def add(self, time: float) -> None:
        """Count one."""
        self.last.append(time)
        self._low = None

    @property
    def is_believed(self) -> bool:
        """Whether they are enough."""
        return len(self.last) >= _BELIEVED

    def keep(self, count: int) -> None:
        """Forget all but the last ones."""
        self.last = deque(list(self.last)[-count:], maxlen=WINDOW)
        self._low = None

    def limit(self, most: float) -> None:
        """Let none count for more."""
        self.last = deque((min(time, most) for time in self.last), maxlen=WINDOW)
        self._low = None

    def scale(self, factor: float) -> None:
        """Multiply all by a factor."""
        self.last = deque((factor * time for time in self.last), maxlen=WINDOW)
        self._low = None

    @property
    def low(self) -> float:
        """The quantile that stands for them."""
        if self._low is None:
            self._low = low(self.last)
        return self._low


class DraftTimes:
    """Seconds of a drafter's step, by the load that the requests for which it drafts are (`load_of`) and the levels of
    the deepest tree: a level takes about as long as another, and what the first one reads takes longer.
    """

    def __init__(self, loads: Mapping[int, dict[int, Times]] | None = None) -> None:
        self._loads = dict(loads or {})
        self._fitted = dict[int, tuple[list[int], list[float]]]()
        """By load: the levels that were measured, and their seconds, which do not fall."""

    def seconds(self, requests: int, levels: float, expected: float) -> float:
        """Of a step for so many requests with so many levels on the mean; `expected`: before any was measured."""
        if not self._loads:
            return expected
        load, more = self._nearest(requests)
        known, seconds = self._by_levels(load)
        # In Python: of such short lists arrays take ten times as long, several times a step.
        after = bisect_left(known, levels)
        if after in (0, len(known)):
            return more * max(0.0, seconds[min(after, len(known) - 1)])
        share = (levels - known[after - 1]) / (known[after] - known[after - 1])
        return more * max(0.0, seconds[after - 1] + share * (seconds[after] - seconds[after - 1]))

    def of_a_level(self, requests: int, expected: float) -> float:
        """Of a further level; `expected`: before trees of several depths were measured."""
        if not self._loads:
            return expected
        load, more = self._nearest(requests)
        known, seconds = self._by_levels(load)
        return more * (seconds[-1] - seconds[0]) / (known[-1] - known[0]) if len(known) > 1 else expected

    def add(self, requests: int, levels: int, seconds: float, expected: float, guesses: int = 1) -> None:
        """Count a step; `expected`: what it was expected to take, which counts as `guesses` steps where nothing was
        measured before.
        """
        load, guesses = load_of(requests), EXPECTED_TIMES if self._loads else guesses
        known = self._loads.setdefault(load, {})
        known.setdefault(min(levels, _MOST_LEVELS), Times([expected] * guesses)).add(seconds)
        self._fitted.pop(load, None)

    def limit(self, most: float) -> None:
        """Let no time count for more."""
        for known in self._loads.values():
            for times in known.values():
                times.limit(most)
        self._fitted.clear()

    def _nearest(self, requests: int) -> tuple[int, float]:
        """The nearest measured load, and how many times its seconds a step for so many requests takes."""
        load = load_of(requests)
        nearest = min(self._loads, key=lambda known: abs(known - load))
        if nearest == load:
            return load, 1.0
        return nearest, (1 + ROW_SLOPE * (requests - 1)) / (1 + ROW_SLOPE * (requests_of(nearest) - 1))

    def _by_levels(self, load: int) -> tuple[list[int], list[float]]:
        if load not in self._fitted:
            known = sorted(self._loads[load])
            self._fitted[load] = known, list(accumulate((self._loads[load][k].low for k in known), max))
        return self._fitted[load]

    def state(self) -> dict[int, dict[int, list[float]]]:
        """What `from_state` reads."""
        return {load: {n: list(w.last) for n, w in known.items()} for load, known in self._loads.items()}

    @staticmethod
    def from_state(state: Mapping[str, Mapping[str, Any]]) -> "DraftTimes":
        """What was kept.

        Raises:
            ValueError, TypeError, AttributeError: something else.
        """
        read = {int(r): {int(n): Times(w) for n, w in known.items()} for r, known in state.items()}
        kept = {r: {n: times for n, times in known.items() if times.is_believed} for r, known in read.items()}
        return DraftTimes({r: known for r, known in kept.items() if known})


def low(times: Iterable[float]) -> float:
    """The quantile that stands for measured times."""
    ordered = sorted(times)
    place = QUANTILE * (len(ordered) - 1)
    below = ordered[int(place)]
    return below + place % 1 * (ordered[min(int(place) + 1, len(ordered) - 1)] - below)
