"""The token tree that promises most tokens for its size, from acceptance rates by depth and rank (Sequoia, arXiv
2402.12374).
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count

Path = tuple[int, ...]
"""The ranks on the way from the root to a node; a child of rank 0 is the likeliest of its siblings."""


def best_paths(acceptance_rate: Callable[[int, int], float], max_depth: int) -> Iterator[tuple[Path, float]]:
    """Nodes by falling probability that they are accepted: the first n are the best tree of n drafted nodes, the root
    not counted.

    `rate(d, r)`: probability that the child of rank r at depth d (1 below the root) is the accepted one, given that its
    parent is accepted. It must not rise with r; 0 ends the siblings. `depth`: of the deepest nodes.

    Expected tokens are a sum of products along paths, and no product exceeds that of its parent or of a better sibling.
    Taking the largest products is therefore exact: it equals Sequoia's dynamic programme in O(n log n). Of equal nodes
    the one found first comes first.
    """
    heap: list[tuple[float, int, Path, float]] = []
    number = count()

    def offer(parent: Path, rank: int, product: float) -> None:
        """Make a child of `parent`, which is accepted with probability `product`, the next of its siblings to be
        taken.
        """
        level = len(parent) + 1
        chance = acceptance_rate(level, rank) if level <= max_depth else 0.0
        if chance > 0:
            heapq.heappush(heap, (-product * chance, next(number), (*parent, rank), product))

    offer((), 0, 1.0)
    while heap:
        negative, _, path, above = heapq.heappop(heap)
        yield path, -negative
        offer(path[:-1], path[-1] + 1, above)
        offer(path, 0, -negative)
