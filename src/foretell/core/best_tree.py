"""The token tree of a size with the most expected tokens, from acceptance rates by depth and rank (Sequoia, arXiv
2402.12374).
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count

Path = tuple[int, ...]
"""Ranks of the nodes on the path from the root to a node; rank 0 is the most probable of its siblings."""


def best_paths(acceptance_rate: Callable[[int, int], float], max_depth: int) -> Iterator[tuple[Path, float]]:
    """Nodes by falling probability of acceptance: the first n are the best tree of n drafted nodes, root excluded.

    `acceptance_rate(d, r)`: probability that the child of rank r at depth d (1 below the root) is accepted, given that
    its parent is. It must not rise with r; 0 ends the siblings. `max_depth`: depth of the deepest nodes.

    The expected number of accepted tokens is a sum of products along paths, and no product exceeds that of its parent
    or of a better sibling. Taking the largest products is therefore exact: it equals Sequoia's dynamic programme in O(n
    log n). Among equal nodes, the one found first comes first.
    """
    heap: list[tuple[float, int, Path, float]] = []
    number = count()

    def push_child(parent: Path, rank: int, product: float) -> None:
        """Queue the child of this rank; `product`: probability that `parent` is accepted."""
        depth = len(parent) + 1
        rate = acceptance_rate(depth, rank) if depth <= max_depth else 0.0
        if rate > 0:
            heapq.heappush(heap, (-product * rate, next(number), (*parent, rank), product))

    push_child((), 0, 1.0)
    while heap:
        negative, _, path, parent_product = heapq.heappop(heap)
        yield path, -negative
        push_child(path[:-1], path[-1] + 1, parent_product)
        push_child(path, 0, -negative)
