"""What a pass of the target costs by the number of tokens it reads: given, or learned from the passes themselves."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

_MOST = 128
"""Larger passes cost in proportion to this one."""
_MEMORY = 24.0
"""Observations after which older ones begin to fade."""


class PassCost:
    """Seconds of a pass over 1, 2, … tokens.

    `table`: measured seconds by number of tokens, interpolated; nothing is learned then. Without one, a pass is expected to cost `slope` more for
    every further token than for the first until passes have been seen; an observation counts for sizes like its own.
    """

    def __init__(self, table: Mapping[int, float] | None = None, slope: float = 0.03) -> None:
        sizes = np.arange(1, _MOST + 1, dtype=np.float64)
        self._given = table is not None
        if table is not None:
            if not table or min(table) < 1 or min(table.values()) <= 0:
                raise ValueError("a cost table needs positive seconds for pass sizes of 1 token or more")
            known = sorted(table)
            self._prior = np.interp(sizes, known, [table[k] for k in known])
        else:
            self._prior = 1 + slope * (sizes - 1)
        self._likeness = np.exp(-((np.log2(sizes)[:, None] - np.log2(sizes)[None, :]) ** 2) / 0.08)
        self._ratio, self._weight = np.zeros(_MOST), np.zeros(_MOST)
        self._estimate = self._prior
        self._since: dict[int, int] = {}

    def seconds(self, first: int, last: int) -> Float[np.ndarray, " n"]:
        """Of passes over `first`, `first + 1`, …, `last` tokens."""
        sizes = np.arange(first, last + 1)
        inside = self._estimate[np.minimum(sizes, _MOST) - 1]
        return np.asarray(inside * np.maximum(sizes / _MOST, 1))

    def unsure(self, size: int, every: int) -> bool:
        """Whether passes of this size should be seen once more: fewer than two were, or none among the last `every`."""
        return not self._given and (size > _MOST or self._weight[size - 1] < 2 or self._since.get(size, 0) >= every)

    def learn(self, size: int, seconds: float) -> None:
        """Count one pass; a value more than twice or less than half of what was expected counts as just that."""
        if self._given or size > _MOST or seconds <= 0:
            return
        self._since = {k: n + 1 for k, n in self._since.items()} | {size: 0}
        ratio, i = seconds / self._prior[size - 1], size - 1
        if self._weight[i] > 0:
            ratio = min(max(ratio, self._ratio[i] / 2), self._ratio[i] * 2)
        self._ratio[i] += (ratio - self._ratio[i]) / (self._weight[i] + 1)
        self._weight[i] = min(self._weight[i] + 1, _MEMORY)
        level = float(self._ratio @ self._weight / self._weight.sum())
        near = self._likeness @ (self._weight * self._ratio) + 0.5 * level
        self._estimate = self._prior * near / (self._likeness @ self._weight + 0.5)
