"""What a pass of the target costs by the number of tokens it reads: given, or learned from the passes themselves."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

_MOST = 128
"""Larger passes cost in proportion to this one."""
_MEMORY = 24.0
"""Observations after which older ones begin to fade."""

_EVERY = 8
"""Passes after which expectations change, once there have been some."""


class PassCost:
    """Seconds of a pass over 1, 2, … tokens.

    `table`: measured seconds by number of tokens, interpolated; nothing is learned then. Without one, a pass is
    expected to cost `slope` more for every further token than for the first; passes that were seen correct this at
    their size, sizes between them by interpolation.
    """

    def __init__(self, table: Mapping[int, float] | None = None, slope: float = 0.03) -> None:
        sizes = np.arange(1, _MOST + 1)
        self._given = table is not None
        self._prior: Float[np.ndarray, " n"] = 1 + slope * (sizes - 1.0)
        if table is not None:
            if not table or min(table) < 1 or min(table.values()) <= 0:
                raise ValueError("a cost table needs positive seconds for pass sizes of 1 token or more")
            known = sorted(table)
            self._prior = np.interp(sizes, known, [table[k] for k in known])
        self._ratio, self._weight = np.zeros(_MOST), np.zeros(_MOST)
        self._between = np.ones(_MOST)
        """Seen over expected seconds, interpolated."""
        self._estimate = self._prior
        self._passes, self._last = 0, np.zeros(_MOST, np.int64)

    def seconds(self, first: int, last: int) -> Float[np.ndarray, " n"]:
        """Of passes over `first`, `first + 1`, …, `last` tokens."""
        if last <= _MOST:
            return self._estimate[first - 1 : last]
        sizes = np.arange(first, last + 1)
        inside = self._estimate[np.minimum(sizes, _MOST) - 1]
        return np.asarray(inside * np.maximum(sizes / _MOST, 1))

    def unsure(self, size: int, every: int = 128, soon: int = 8) -> bool:
        """Whether a pass of this size should be seen once more: none was among the last `every`, or among the first
        `soon`.
        """
        if self._given or size > _MOST:
            return False
        return bool(self._passes - self._last[size - 1] >= (every if self._weight[size - 1] else soon))

    def learn(self, size: int, seconds: float) -> None:
        """Count one pass; a value more than twice or less than half of what was expected counts as just that."""
        if self._given or size > _MOST or seconds <= 0:
            return
        i = size - 1
        ratio = seconds / self._prior[i]
        if self._passes:
            ratio = min(max(ratio, self._between[i] / 2), self._between[i] * 2)
            if not self._weight[i]:
                self._ratio[i], self._weight[i] = self._between[i], 1
        self._passes += 1
        self._last[i] = self._passes
        self._ratio[i] += (ratio - self._ratio[i]) / (self._weight[i] + 1)
        self._weight[i] = min(self._weight[i] + 1, _MEMORY)
        if self._passes < _MEMORY or self._passes % _EVERY == 0:
            self._conclude()

    def _conclude(self) -> None:
        """Expect what was seen."""
        seen = np.flatnonzero(self._weight)
        self._between = np.interp(np.arange(_MOST), seen, self._ratio[seen])
        # A larger pass never costs less: what looks like it is noise.
        self._estimate = np.maximum.accumulate(self._prior * self._between)
