"""Seconds of a target pass by the number of tokens it reads: given, or learned from the passes of a run."""

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np
from jaxtyping import Float

_MAX_TOKENS = 128
"""Largest size with an estimate of its own; larger passes cost in proportion to it."""
_MEMORY = 24.0
"""Observations per size after which older ones begin to fade."""
_KNOWN = 4.0
"""Observations after which the estimate of a size counts in the machine's present speed."""
_EXPECTED_WEIGHT = 0.25
"""Weight of the interpolated estimate of a size, in observations, when it is first seen."""
_RETRY_INTERVAL = 64
"""Most passes between two measurements of a size that is not known yet."""
_DRIFT_PASSES = 9
"""Last passes whose median deviation from the estimates is the machine's present speed."""
_REFIT_INTERVAL = 8
"""Passes between two updates of the estimate, after the first `_MEMORY` passes."""
_SIZES = np.arange(_MAX_TOKENS)
_MAX_CHANGE, _MAX_KNOWN_CHANGE = 2.0, 1.25
"""An observation counts as at most this many times the estimate, and at least one over it; the second number holds for
sizes with `_KNOWN` observations.
"""


class PassCost:
    """Seconds of a pass over 1, 2, … tokens.

    `table`: measured seconds by number of tokens, interpolated; then nothing is learned. Without it, every further
    token is first assumed to cost `slope` times the first one. Observed passes correct this at their size, and the
    correction is interpolated between sizes. What makes all sizes slower alike, such as other work on the machine, is
    not counted for the size that meets it: an observation is first divided by the median deviation of the last passes.

    Raises:
        ValueError: an empty table, or values that are not positive.
    """

    def __init__(self, table: Mapping[int, float] | None = None, slope: float = 0.03) -> None:
        self._fixed = table is not None
        self._prior: Float[np.ndarray, " n"] = 1 + slope * np.arange(_MAX_TOKENS) if table is None else _filled(table)
        self._ratio, self._weight = [0.0] * _MAX_TOKENS, [0.0] * _MAX_TOKENS
        """Observed over prior seconds of each size, and the weight of the observations."""
        self._interpolated_ratio = np.ones(_MAX_TOKENS)
        self._estimates: list[float] = self._prior.tolist()
        self._deviations = deque[float](maxlen=_DRIFT_PASSES)
        """Observed over estimated seconds of the last passes."""
        self._speed = 1.0
        """Their median."""
        self._passes, self._last_seen = 0, [0] * _MAX_TOKENS
        self._increases = dict[tuple[int, int], float]()
        """What `least_increase` has found with the present estimate, at a speed of 1."""

    def expect(self, table: Mapping[int, float]) -> None:
        """Begin with these seconds by number of tokens, interpolated; what is observed corrects them. Nothing changes
        where the seconds were given, or some were observed.

        Raises:
            ValueError: an empty table, or values that are not positive.
        """
        expected = _filled(table)
        if not self._fixed and not self._passes:
            self._prior = expected
            self._set_estimate(expected)

    @property
    def fixed(self) -> bool:
        """Whether the seconds were given."""
        return self._fixed

    def seconds_of(self, sizes: Iterable[int]) -> list[float]:
        """Seconds of passes over these numbers of tokens."""
        return [self._estimates[min(n, _MAX_TOKENS) - 1] * self._speed * max(n / _MAX_TOKENS, 1.0) for n in sizes]

    def least_increase(self, first: int, last: int) -> float:
        """Least seconds per further token, over all passes of `first + 1` to `last` tokens."""
        if (first, last) not in self._increases:
            seconds = np.array(self.seconds_of(range(first, last + 1))) / self._speed
            further = (seconds[1:] - seconds[0]) / np.arange(1, len(seconds))
            self._increases[first, last] = float(further.min())
        return self._increases[first, last] * self._speed

    def needs_measurement(self, size: int, interval: int = 128, initial_interval: int = 8) -> bool:
        """Whether a pass of this size should be measured: none was among the last `interval` passes (fewer while the
        size is not known), or among the first `initial_interval`.
        """
        if self._fixed or size > _MAX_TOKENS:
            return False
        weight = self._weight[size - 1]
        if weight:
            initial_interval = interval if weight >= _KNOWN else min(interval, _RETRY_INTERVAL)
        return self._passes - self._last_seen[size - 1] >= initial_interval

    def update(self, size: int, seconds: float) -> None:
        """Count one pass over `size` tokens; outliers are clipped (`_MAX_CHANGE`)."""
        if self._fixed or size > _MAX_TOKENS or seconds <= 0:
            return
        i = size - 1
        if self._weight[i] >= _KNOWN:
            self._deviations.append(seconds / self._estimates[i])
            self._speed = median(self._deviations)
        ratio, expected = seconds / (self._speed * float(self._prior[i])), float(self._interpolated_ratio[i])
        if self._passes:
            most = _MAX_KNOWN_CHANGE if self._weight[i] >= _KNOWN else _MAX_CHANGE
            ratio = min(max(ratio, expected / most), expected * most)
            if not self._weight[i]:
                self._ratio[i], self._weight[i] = expected, _EXPECTED_WEIGHT
        self._passes += 1
        self._last_seen[i] = self._passes
        self._ratio[i] += (ratio - self._ratio[i]) / (self._weight[i] + 1)
        self._weight[i] = min(self._weight[i] + 1, _MEMORY)
        if self._passes < _MEMORY or self._passes % _REFIT_INTERVAL == 0:
            self._refit()

    def _refit(self) -> None:
        """Interpolate the observations."""
        seen = [i for i, weight in enumerate(self._weight) if weight]
        self._interpolated_ratio = np.interp(_SIZES, seen, [self._ratio[i] for i in seen])
        # A larger pass cannot cost less: such an observation is measurement noise.
        self._set_estimate(np.maximum.accumulate(self._prior * self._interpolated_ratio))

    def _set_estimate(self, seconds: Float[np.ndarray, " n"]) -> None:
        self._estimates = seconds.tolist()
        self._increases.clear()


def _filled(table: Mapping[int, float]) -> Float[np.ndarray, " n"]:
    """The seconds of all sizes."""
    if not table or min(table) < 1 or min(table.values()) <= 0:
        raise ValueError("a cost table needs positive seconds for pass sizes of 1 token or more")
    known = sorted(table)
    return np.interp(np.arange(1, _MAX_TOKENS + 1), known, [table[k] for k in known])
