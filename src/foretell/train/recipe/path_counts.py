"""Counts of correct rank paths, from which the best tree of any size follows."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from foretell.core.best_tree import Path


class PathCounts:
    """How often each rank path was correct. Old counts decay, so that a drafter can be observed while it is trained.

    Medusa (arXiv 2401.10774, 2.1.2) multiplies the accuracies of its heads as if they were independent. Counting paths
    keeps their correlation, and the `n` most frequent paths are the tree of `n` nodes with the most expected tokens,
    because no path is more frequent than its own prefix. `ranks`: ranks per position that are counted. `decay`: share
    of the old counts that is kept at each addition.
    """

    def __init__(self, ranks: int = 10, decay: float = 0.98) -> None:
        self._ranks, self._decay = ranks, decay
        self._counts: dict[Path, float] = {}
        self._total = 0.0

    def add(self, rank: Int[np.ndarray, "n k"], known: Bool[np.ndarray, "n k"]) -> None:
        """Count positions: the rank that the drafter gave to each of the `k` correct tokens.

        Positions with an unknown rank are left out.
        """
        rank = rank[known.all(1)]
        self._counts = {path: self._decay * c for path, c in self._counts.items() if self._decay * c > 1e-3}
        self._total = self._decay * self._total + len(rank)
        for depth in range(1, rank.shape[1] + 1):
            rank = rank[rank[:, depth - 1] < self._ranks]
            paths, times = np.unique(rank[:, :depth], axis=0, return_counts=True)
            for path, count in zip(map(tuple, paths.tolist()), times.tolist(), strict=True):
                self._counts[path] = self._counts.get(path, 0.0) + count

    def most_frequent(self, limit: int = 128) -> tuple[tuple[Path, ...], tuple[float, ...]]:
        """The most frequent paths, each after its prefixes, and their shares of all positions."""
        order = sorted(self._counts, key=lambda p: (-self._counts[p], len(p), p))[:limit]
        return tuple(order), tuple(round(self._counts[p] / self._total, 4) for p in order)

    def state(self) -> dict[str, np.ndarray]:
        """All counts as arrays: `paths` `[n, k]`, padded with -1, their `counts` `[n]`, and the `total` of
        positions.
        """
        paths = np.full((len(self._counts), max(map(len, self._counts), default=0)), -1, np.int64)
        for row, path in zip(paths, self._counts, strict=True):
            row[: len(path)] = path
        counts = np.array(list(self._counts.values()), np.float64)
        return {"paths": paths, "counts": counts, "total": np.array(self._total)}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        paths = [tuple(r for r in path if r >= 0) for path in state["paths"].tolist()]
        self._counts = dict(zip(paths, state["counts"].tolist(), strict=True))
        self._total = float(state["total"])
