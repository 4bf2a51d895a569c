"""The tree that promises most tokens for its size, from measured acceptance: Sequoia's shape."""

import heapq
from collections.abc import Sequence

from foretell.shape.fixed import Fixed, Path


def optimal(
    budget: int, acceptance: Sequence[Sequence[float]] | Sequence[float], depth: int = 0, draw: bool = False
) -> Fixed:
    """The best tree of `budget` drafted nodes (Sequoia, arXiv 2402.12374).

    `acceptance[r]` is the probability that the child of rank `r` is the one accepted, given that its parent was; one vector for all depths, or one
    per depth (the last repeats). Expected tokens are a sum of path products, every product is at most its parent's and its better siblings', so
    taking the largest products is exact: the same as Sequoia's dynamic programme, in O(n log n). Ranks are sorted first if need be.

    Raises:
        ValueError: a negative budget, or values that are not probabilities of exclusive events.
    """
    table = _by_depth(acceptance)
    if budget < 0 or any(min(row) < 0 or sum(row) > 1 + 1e-9 for row in table):
        raise ValueError(
            "an optimal tree needs a budget of 0 or more nodes and, per depth, acceptance rates in 0..1 that sum to at most 1"
        )
    order = [[rank for _, rank in sorted((-rate, rank) for rank, rate in enumerate(row))] for row in table]
    heap: list[tuple[float, Path]] = []

    def push(parent: Path, place: int, product: float) -> None:
        """Offer the `place`-th likeliest child of `parent`."""
        d = min(len(parent), len(table) - 1)
        if place < len(order[d]) and not (depth and len(parent) >= depth):
            rank = order[d][place]
            if table[d][rank] > 0:
                heapq.heappush(heap, (-product * table[d][rank], (*parent, rank)))

    chosen: list[Path] = []
    values: dict[Path, float] = {(): 1.0}
    push((), 0, 1.0)
    while heap and len(chosen) < budget:
        value, path = heapq.heappop(heap)
        chosen.append(path)
        values[path] = -value
        d = min(len(path) - 1, len(table) - 1)
        push(path[:-1], order[d].index(path[-1]) + 1, values[path[:-1]])
        push(path, 0, -value)
    return Fixed(tuple(sorted(chosen, key=lambda p: (len(p), p))), draw)


def _by_depth(acceptance: Sequence[Sequence[float]] | Sequence[float]) -> list[list[float]]:
    rows, flat = list[list[float]](), list[float]()
    for item in acceptance:
        if isinstance(item, Sequence):
            rows.append(list(item))
        else:
            flat.append(item)
    return rows or [flat]


def expected_tokens(tree: Fixed, acceptance: Sequence[float]) -> float:
    """Tokens per pass that a tree promises under rank acceptance rates, the target's own token included."""
    total = 1.0
    for path in tree.choices:
        product = 1.0
        for rank in path:
            product *= acceptance[rank]
        total += product
    return total
