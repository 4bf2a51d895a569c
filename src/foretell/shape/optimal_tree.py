"""The tree of a size with the most expected tokens, from measured acceptance rates: Sequoia's tree."""

from collections.abc import Sequence
from itertools import islice

from foretell.core.best_tree import best_paths
from foretell.shape.fixed_tree import FixedTree


def optimal_tree(
    budget: int, acceptance: Sequence[Sequence[float]] | Sequence[float], depth: int = 0, draw: bool = False
) -> FixedTree:
    """The best tree of `budget` drafted nodes (Sequoia, arXiv 2402.12374).

    `acceptance[r]` is the probability that the child of rank `r` is the one accepted, given that its parent was; one
    vector for all depths, or one per depth (the last repeats). Ranks are sorted first if need be.

    Raises:
        ValueError: a negative budget, or values that are not probabilities of exclusive events.
    """
    table = _by_depth(acceptance)
    if budget < 0 or any(min(row) < 0 or sum(row) > 1 + 1e-9 for row in table):
        raise ValueError(
            "an optimal tree needs a budget of 0 or more nodes and, per depth, acceptance rates in 0..1 that sum to at "
            "most 1"
        )
    order = [sorted(range(len(row)), key=lambda rank: (-row[rank], rank)) for row in table]
    last = len(table) - 1

    def rate(level: int, place: int) -> float:
        d = min(level - 1, last)
        return table[d][order[d][place]] if place < len(order[d]) else 0.0

    best = islice(best_paths(rate, depth or budget), budget)
    paths = [tuple(order[min(d, last)][place] for d, place in enumerate(path)) for path, _ in best]
    return FixedTree(tuple(sorted(paths, key=lambda p: (len(p), p))), draw)


def _by_depth(acceptance: Sequence[Sequence[float]] | Sequence[float]) -> list[list[float]]:
    rows, flat = list[list[float]](), list[float]()
    for item in acceptance:
        if isinstance(item, Sequence):
            rows.append(list(item))
        else:
            flat.append(item)
    return rows or [flat]
