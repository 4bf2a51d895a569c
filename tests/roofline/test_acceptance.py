"""Tokens per pass: closed forms, dynamic programming, brute force and simulation agree."""

import itertools
import random
from collections.abc import Sequence
from functools import cache

import pytest

from foretell.roofline.acceptance import (
    AcceptanceByRank,
    best_trees,
    fit_acceptance,
    geometric_acceptance,
)

RANKS = (0.6, 0.15, 0.07, 0.04)


def chain_tokens(acceptance: float, drafted: int) -> float:
    """Expected tokens per pass of a chain of independently accepted drafts (arXiv 2211.17192, equation 1)."""
    return drafted + 1.0 if acceptance == 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def tree_tokens(parents: Sequence[int], ranks: Sequence[int], acceptance: AcceptanceByRank) -> float:
    """Tokens per pass of a given tree: node 0 is the root, parents[i] < i, ranks[i] is the rank among siblings."""
    reached, depth = [1.0], [0]
    for parent, rank in list(zip(parents, ranks, strict=True))[1:]:
        depth.append(depth[parent] + 1)
        reached.append(reached[parent] * acceptance.at(depth[-1], rank))
    return sum(reached)


def by_dynamic_programming(ranks: tuple[float, ...], decay: float, nodes: int, depth: int) -> float:
    """The best value of at most `nodes` nodes, splitting the budget over children in every way (independent of
    `grow`).
    """

    @cache
    def tree(level: int, budget: int) -> float:
        return 1 + (children(level + 1, 0, budget - 1) if level < depth else 0.0)

    @cache
    def children(level: int, rank: int, budget: int) -> float:
        if budget == 0 or rank == len(ranks):
            return 0.0
        p = ranks[rank] * decay ** (level - 1)
        return max(0.0, *(p * tree(level, x) + children(level, rank + 1, budget - x) for x in range(1, budget + 1)))

    return tree(0, nodes)


def test_a_chain_is_a_tree_without_branches() -> None:
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for drafted in (1, 4, 9):
            path = tree_tokens(range(-1, drafted), [0] * (drafted + 1), AcceptanceByRank((alpha,), ""))
            assert chain_tokens(alpha, drafted) == pytest.approx(path)
            assert best_trees(AcceptanceByRank((alpha or 1e-300,), ""), drafted + 1, drafted).tokens[
                -1
            ] == pytest.approx(path)


@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_greedy_trees_are_optimal(decay: float, depth: int) -> None:
    grown = best_trees(AcceptanceByRank(RANKS, "", decay), 14, depth)
    for nodes, tokens in enumerate(grown.tokens, 1):
        assert tokens == pytest.approx(by_dynamic_programming(RANKS, decay, nodes, depth), rel=1e-12)


def test_greedy_trees_beat_every_tree_of_five_nodes() -> None:
    best = 0.0
    for parents in itertools.product(*(range(i) for i in range(1, 5))):
        ranks = [list(parents[:i]).count(parent) for i, parent in enumerate(parents)]
        best = max(best, tree_tokens([-1, *parents], [0, *ranks], AcceptanceByRank(RANKS, "")))
    assert best_trees(AcceptanceByRank(RANKS, ""), 5, 4).tokens[-1] == pytest.approx(best)


def test_gains_shrink_and_expanded_nodes_are_parents() -> None:
    grown = best_trees(geometric_acceptance(0.7, ""), 60, 6)
    steps = [b - a for a, b in itertools.pairwise(grown.tokens)]
    assert all(x >= y - 1e-15 for x, y in itertools.pairwise(steps))
    assert grown.nodes_expanded[1] == (1, 0, 0, 0, 0, 0)
    assert all(widths[0] <= 1 and sum(widths) < nodes for nodes, widths in enumerate(grown.nodes_expanded, 1))


def test_a_simulation_reproduces_the_expectation() -> None:
    draw, trials, accepted = random.Random(7), 20_000, 0
    for _ in range(trials):
        level = 0
        while level < 3 and draw.random() < 0.6:
            level += 1
        accepted += 1 + level
    assert accepted / trials == pytest.approx(chain_tokens(0.6, 3), abs=3 * 1.1 / trials**0.5)


def test_published_tokens_are_fitted_exactly() -> None:
    for tokens, nodes, depth in ((3.64, 26, 5), (5.71, 61, 7), (1.6, 11, 10)):
        found = fit_acceptance(tokens, nodes, depth, "paper")
        assert best_trees(found, nodes, depth).tokens[-1] == pytest.approx(tokens, rel=1e-9)
    with pytest.raises(ValueError, match="cannot come from 3 nodes of depth 2"):
        fit_acceptance(9.0, 3, 2, "paper")


@pytest.mark.parametrize("ranks", [(0.8, 0.3), (0.1, 0.2), (-0.1,), ()])
def test_invalid_acceptance_is_rejected(ranks: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="acceptance by rank"):
        AcceptanceByRank(ranks, "")
