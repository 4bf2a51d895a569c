"""Expected tokens per pass of chains and trees, from the acceptance probability of their nodes.

Let p(d, r) be the probability that the child of rank r at depth d is accepted, given that its parent is. A pass yields
F = 1 + the sum over drafted nodes of the product of p along their paths; the 1 is the token that the target adds.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from foretell.core.best_tree import best_paths

REMAINDER_COVERED, RANK_DECAY = 0.75, 0.5
"""Of `geometric_acceptance`; chosen so that it agrees with SpecInfer's measurement (arXiv 2305.09781)."""
MAX_RANKS = 8


@dataclass(frozen=True)
class AcceptanceByRank:
    """Acceptance probability of the child of each rank, multiplied by `decay` for each further depth.

    ranks: non-increasing, sum at most 1. source: where the figures come from. by_depth: in place of `decay`, the factor
    at depth 1, 2, …; the last one holds for all further depths.

    Raises:
        ValueError: `ranks`, `decay` or `by_depth` violate this.
    """

    ranks: tuple[float, ...]
    source: str
    decay: float = 1.0
    by_depth: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or sum(self.ranks) > 1 + 1e-9:
            raise ValueError(
                f"acceptance by rank must be probabilities that add up to at most 1, found {list(self.ranks)}"
            )
        if list(self.ranks) != sorted(self.ranks, reverse=True):
            raise ValueError(f"acceptance by rank must not increase: sort the siblings, found {list(self.ranks)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay of acceptance with depth must lie in (0, 1], found {self.decay}")
        if self.by_depth and (min(self.by_depth) < 0 or max(self.by_depth) * sum(self.ranks) > 1 + 1e-9):
            raise ValueError(f"acceptance by depth must be a probability, found factors {list(self.by_depth)}")

    def at(self, depth: int, rank: int) -> float:
        """Acceptance of the child of a rank, counted from 0, at a depth, counted from 1."""
        if rank >= len(self.ranks):
            return 0.0
        factor = self.by_depth[min(depth, len(self.by_depth)) - 1] if self.by_depth else self.decay ** (depth - 1)
        return self.ranks[rank] * factor


def geometric_acceptance(first: float, source: str, chain: bool = False, decay: float = 1.0) -> AcceptanceByRank:
    """Acceptance `first` for rank 0, then a geometric series over the ranks below that covers 3/4 of the remainder;
    `decay`: of `AcceptanceByRank`.

    At 0.66 the first five ranks cover 0.9, near what SpecInfer measured for LLaMA-68M drafting LLaMA-7B (0.82 to 0.89).

    Raises:
        ValueError: `first` is not a probability.
    """
    if not 0 <= first <= 1:
        raise ValueError(f"acceptance must lie between 0 and 1, found {first}")
    # Below one half the series would otherwise start above `first`.
    others = [min(first, REMAINDER_COVERED * (1 - first) * RANK_DECAY**r) for r in range(1, MAX_RANKS)]
    return AcceptanceByRank((first,) if chain else (first, *others), source, decay)


@dataclass(frozen=True)
class BestTrees:
    """Best trees under one depth limit: for 1, 2, ... nodes (root included), tokens per pass and nodes expanded per
    level.
    """

    tokens: tuple[float, ...]
    nodes_expanded: tuple[tuple[int, ...], ...]


def best_trees(acceptance: AcceptanceByRank, nodes: int, depth: int) -> BestTrees:
    """The best tree of every size up to `nodes` with depth at most `depth`; ends early where no node is left."""
    width = [0] * depth
    tokens, expanded = [1.0], [(0,) * depth]
    for path, probability in islice(best_paths(acceptance.at, depth), max(nodes - 1, 0)):
        if path[-1] == 0:
            width[len(path) - 1] += 1
        tokens.append(tokens[-1] + probability)
        expanded.append(tuple(width))
    return BestTrees(tuple(tokens), tuple(expanded))


@lru_cache(maxsize=512)
def fit_acceptance(
    tokens: float, nodes: int, depth: int, source: str, chain: bool = False, decay: float = 1.0
) -> AcceptanceByRank:
    """The `geometric_acceptance` with that decay whose best tree of that size yields the given tokens per pass.

    Raises:
        ValueError: more tokens than such a tree can yield.
    """
    low, high = 0.0, 1.0
    highest = best_trees(geometric_acceptance(1.0, source, chain, decay), nodes, depth).tokens[-1]
    if not 1 <= tokens <= highest:
        raise ValueError(
            f"{tokens:g} tokens per pass cannot come from {nodes} nodes of depth {depth}: "
            f"it must lie in 1 to {highest:g}"
        )
    for _ in range(50):
        middle = (low + high) / 2
        expected = best_trees(geometric_acceptance(middle, source, chain, decay), nodes, depth).tokens[-1]
        low, high = (middle, high) if expected < tokens else (low, middle)
    return geometric_acceptance(high, source, chain, decay)
