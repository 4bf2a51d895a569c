"""How many tokens a pass yields: chains and trees whose nodes are accepted with given probabilities.

If p(d, r) is the probability that the child of rank r at depth d is the accepted one given that its parent is, a pass
yields F = 1 + the sum over drafted nodes of the products along their paths (the leading 1 is the token the target adds
itself).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from foretell.core.best_tree import best_paths

COVERAGE, FALL = 0.75, 0.5
RANKS = 8


@dataclass(frozen=True)
class Acceptance:
    """Probability of each child rank (disjoint events, non-increasing, sum at most 1), times `decay` per further depth;
    and its source.

    Raises:
        ValueError: probabilities that are no such thing.
    """

    ranks: tuple[float, ...]
    source: str
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or sum(self.ranks) > 1 + 1e-9:
            raise ValueError(
                f"acceptance by rank must be probabilities that add up to at most 1, found {list(self.ranks)}"
            )
        if list(self.ranks) != sorted(self.ranks, reverse=True):
            raise ValueError(f"acceptance by rank must not increase: sort the siblings, found {list(self.ranks)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay of acceptance with depth must lie in (0, 1], found {self.decay}")


def profile(first: float, source: str, chain: bool = False) -> Acceptance:
    """Acceptance whose best-ranked child stands with probability `first`; three quarters of the rest falls by halves
    over the others.

    At 0.66 the first five cover 0.9, near what SpecInfer measured for LLaMA-68M drafting LLaMA-7B (0.82 to 0.89).
    """
    if not 0 <= first <= 1:
        raise ValueError(f"acceptance must lie between 0 and 1, found {first}")
    # Below one half the law of halves would rank the second child above the first.
    others = [min(first, COVERAGE * (1 - first) * FALL**r) for r in range(1, RANKS)]
    return Acceptance((first,) if chain else (first, *others), source)


def chain_tokens(alpha: float, drafted: int) -> float:
    """Expected tokens per pass of a chain of independently accepted drafts (arXiv 2211.17192, equation 1)."""
    return drafted + 1.0 if alpha == 1 else (1 - alpha ** (drafted + 1)) / (1 - alpha)


@dataclass(frozen=True)
class Growth:
    """Best trees of one depth limit: for 1, 2, ... nodes (root included) the tokens per pass and the nodes expanded per
    level.
    """

    tokens: tuple[float, ...]
    expanded: tuple[tuple[int, ...], ...]


def grow(acceptance: Acceptance, nodes: int, depth: int) -> Growth:
    """The best tree of every size up to `nodes`, no deeper than `depth`; stops early where no node is left."""
    ranks = acceptance.ranks

    def rate(level: int, rank: int) -> float:
        return ranks[rank] * acceptance.decay ** (level - 1) if rank < len(ranks) else 0.0

    width = [0] * depth
    tokens, expanded = [1.0], [(0,) * depth]
    for path, chance in islice(best_paths(rate, depth), max(nodes - 1, 0)):
        if path[-1] == 0:
            width[len(path) - 1] += 1
        tokens.append(tokens[-1] + chance)
        expanded.append(tuple(width))
    return Growth(tuple(tokens), tuple(expanded))


def fitted(tokens: float, nodes: int, depth: int, source: str, chain: bool = False) -> Acceptance:
    """The profile whose best tree of that size yields the published tokens per pass.

    Raises:
        ValueError: more tokens than such a tree can yield.
    """
    low, high = 0.0, 1.0
    most = grow(profile(1.0, source, chain), nodes, depth).tokens[-1]
    if not 1 <= tokens <= most:
        raise ValueError(
            f"{tokens:g} tokens per pass cannot come from {nodes} nodes of depth {depth}: it must lie in 1 to {most:g}"
        )
    for _ in range(50):
        middle = (low + high) / 2
        reached = grow(profile(middle, source, chain), nodes, depth).tokens[-1]
        low, high = (middle, high) if reached < tokens else (low, middle)
    return profile(high, source, chain)


def tree_tokens(parents: Sequence[int], ranks: Sequence[int], acceptance: Acceptance) -> float:
    """Tokens per pass of a given tree: parents[i] < i, node 0 the root; ranks[i] the rank of node i among its
    siblings.
    """
    reach, depth = [1.0], [0]
    for parent, rank in list(zip(parents, ranks, strict=True))[1:]:
        p = acceptance.ranks[rank] if rank < len(acceptance.ranks) else 0.0
        depth.append(depth[parent] + 1)
        reach.append(reach[parent] * p * acceptance.decay ** depth[parent])
    return sum(reach)
