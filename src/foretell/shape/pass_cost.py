"""What a pass of the target costs by the number of tokens it reads: given, or learned from the passes themselves."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

_MAX_TOKENS = 128
"""Larger passes cost in proportion to this one."""
_MEMORY = 24.0
"""Observations after which older ones begin to fade."""

_REFIT_INTERVAL = 8
"""Passes after which expectations change, once there have been some."""


class PassCost:
    """Seconds of a pass over 1, 2, … tokens.

    `table`: measured seconds by number of tokens, interpolated; nothing is learned then. Without one, a pass is
    expected to cost `slope` more for every further token than for the first; passes that were seen correct this at
    their size, sizes between them by interpolation.
    """

    def __init__(self, table: Mapping[int, float] | None = None, slope: float = 0.03) -> None:
        sizes = np.arange(1, _MAX_TOKENS + 1)
        self._fixed = table is not None
        self._prior: Float[np.ndarray, " n"] = 1 + slope * (sizes - 1.0)
        if table is not None:
            if not table or min(table) < 1 or min(table.values()) <= 0:
                raise ValueError("a cost table needs positive seconds for pass sizes of 1 token or more")
            known = sorted(table)
            self._prior = np.interp(sizes, known, [table[k] for k in known])
        self._ratio, self._weight = np.zeros(_MAX_TOKENS), np.zeros(_MAX_TOKENS)
        self._interpolated_ratio = np.ones(_MAX_TOKENS)
        """Seen over expected seconds, interpolated."""
        self._estimate = self._prior
        self._passes, self._last = 0, np.zeros(_MAX_TOKENS, np.int64)

    def seconds(self, first: int, last: int) -> Float[np.ndarray, " n"]:
        """Of passes over `first`, `first + 1`, …, `last` tokens."""
        if last <= _MAX_TOKENS:
            return self._estimate[first - 1 : last]
        sizes = np.arange(first, last + 1)
        inside = self._estimate[np.minimum(sizes, _MAX_TOKENS) - 1]
        return np.asarray(inside * np.maximum(sizes / _MAX_TOKENS, 1))

    def needs_measurement(self, size: int, interval: int = 128, initial_interval: int = 8) -> bool:
        """Whether a pass of this size should be seen once more: none was among the last `every`, or among the first
        `soon`.
        """
        if self._fixed or size > _MAX_TOKENS:
            return False
        return bool(self._passes - self._last[size - 1] >= (interval if self._weight[size - 1] else initial_interval))

    def update(self, size: int, seconds: float) -> None:
        """Count one pass; a value more than twice or less than half of what was expected counts as just that."""
        if self._fixed or size > _MAX_TOKENS or seconds <= 0:
            return
        i = size - 1
        ratio = seconds / self._prior[i]
        if self._passes:
            ratio = min(max(ratio, self._interpolated_ratio[i] / 2), self._interpolated_ratio[i] * 2)
            if not self._weight[i]:
                self._ratio[i], self._weight[i] = self._interpolated_ratio[i], 1
        self._passes += 1
        self._last[i] = self._passes
        self._ratio[i] += (ratio - self._ratio[i]) / (self._weight[i] + 1)
        self._weight[i] = min(self._weight[i] + 1, _MEMORY)
        if self._passes < _MEMORY or self._passes % _REFIT_INTERVAL == 0:
            self._refit()

    def _refit(self) -> None:
        """Expect what was seen."""
        seen = np.flatnonzero(self._weight)
        self._interpolated_ratio = np.interp(np.arange(_MAX_TOKENS), seen, self._ratio[seen])
        # A larger pass never costs less: what looks like it is noise.
        self._estimate = np.maximum.accumulate(self._prior * self._interpolated_ratio)
