"""Shapes over a drafter whose every distribution is known."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.accept import Match
from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree, concatenate_trees, merge_trees, tree_from_lists
from foretell.draft import Continuation, DrafterUnion, NoDrafter, Predictor, PromptLookup, Retriever
from foretell.draft.base import Drafter
from foretell.engine.method import Method
from foretell.shape import (
    BeamSearch,
    BranchingTree,
    Chain,
    DynamicTree,
    FixedTree,
    LLMCadTree,
    RootOnly,
    Shape,
    Trie,
    optimal_tree,
)
from foretell.shape.base import TreeBuilder
from helpers import context_of

VOCAB = 6
SAMPLED = SamplingParams(temperature=1.0)


class Table(Predictor):
    """A first-order drafter: the distribution after a token depends on that token only."""

    def __init__(self, vocab: int = VOCAB, seed: int = 3) -> None:
        self.p = np.random.default_rng(seed).dirichlet(np.ones(vocab), vocab)

    def expand(self, tree: TokenTree, frontier: np.ndarray, context: Context) -> tuple[torch.Tensor, np.ndarray]:
        at = np.arange(tree.token.size).reshape(tree.token.shape)
        return torch.from_numpy(np.log(self.p[tree.token.ravel()])), at


@dataclass
class FixedRetriever(Retriever):
    """Retrieves the same continuations for every request."""

    continuations: list[Continuation]

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        return [self.continuations for _ in context.rows]


def paths(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """Tokens from the root down to every valid node, the root excluded."""
    return [
        tuple(int(tree.token[row, a]) for a in tree.ancestors(row, n)[1:])
        for n in range(1, tree.nodes)
        if tree.valid[row, n]
    ]


def path_probability(p: np.ndarray, root: int, path: Sequence[int]) -> float:
    product = 1.0
    for before, token in zip([root, *path], path, strict=False):
        product *= p[before, token]
    return product


def well_formed(tree: TokenTree) -> None:
    """Parents come first, and parents of valid nodes are valid."""
    for row in range(tree.rows):
        assert tree.parent[row, 0] == -1
        for node in range(1, tree.nodes):
            parent = tree.parent[row, node]
            assert 0 <= parent < node
            assert tree.valid[row, parent] or not tree.valid[row, node]


SHAPES: list[Shape[Predictor]] = [
    Chain(4),
    Chain(0),
    Chain(4, draw=False, confidence=0.3),
    BranchingTree((3, 2, 1)),
    BranchingTree((2, 9), distinct=True),
    BranchingTree((3, 2), distinct=False),
    BranchingTree((2, 2), draw=False),
    FixedTree(((0,), (2,), (2, 1), (2, 0), (2, 0, 8))),
    FixedTree(((0,), (1,), (0, 0)), draw=True),
    DynamicTree(4, 3, 8),
    DynamicTree(3, 9, 50),
    DynamicTree(3, 2, 5, min_score=0.2),
    BeamSearch(3, 4),
    optimal_tree(12, [0.5, 0.2, 0.1]),
]


class StrictTable(Table):
    """Refuses to be asked about nothing."""

    def expand(self, tree: TokenTree, frontier: np.ndarray, context: Context) -> tuple[torch.Tensor, np.ndarray]:
        assert np.take_along_axis(tree.valid, frontier, 1).any()
        return super().expand(tree, frontier, context)


STATEFUL = [LLMCadTree(6)]


@pytest.mark.parametrize("shape", [*SHAPES, *STATEFUL], ids=lambda shape: str(shape).split(" object")[0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_whose_tokens_are_all_forbidden_drafts_nothing_that_is_sampled(
    shape: Shape[Predictor], temperature: float
) -> None:
    """The other requests of the batch get the tree that they get alone."""
    free = SamplingParams(temperature=temperature, seed=2)
    banned = replace(free, logit_bias=dict.fromkeys(range(VOCAB), -float("inf")))
    together = replace(context_of([1, 2], [3, 4], max_depth=5), sampling_params=(banned, free))
    draft = StrictTable()
    tree = shape.grow(draft, together)
    well_formed(tree)
    assert paths(tree, 1) == paths(shape.grow(draft, together.select([1])))
    if not isinstance(shape, LLMCadTree):  # ranks by the drafter's own probabilities
        single = isinstance(shape, Chain) or (temperature and getattr(shape, "draw", False))
        assert not single or not paths(tree, 0)
    assert (tree.q_index[0] < 0).all()
    well_formed(shape.grow(draft, replace(together.select([0]))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SAMPLED, SamplingParams(temperature=1.0, top_k=2)],
    ids=["greedy", "sampled", "top 2"],
)
def test_trees_are_well_formed_and_no_deeper_than_their_maximum(
    shape: Shape[Predictor], sampling: SamplingParams
) -> None:
    context = context_of([1, 2], [3], [4, 4, 5], sampling=sampling)
    context.max_depth[:] = [0, 2, 9]
    tree = shape.grow(Table(), context)
    well_formed(tree)
    for row, max_depth in enumerate(context.max_depth.tolist()):
        assert tree.depth[row][tree.valid[row]].max() <= max_depth
    assert tree.token[:, 0].tolist() == [2, 3, 5]
    if tree.distinct.any():
        for row in range(tree.rows):
            for children in tree.children(row).values():
                assert len({int(tree.token[row, c]) for c in children}) == len(children)


def test_trees_by_rank_hold_the_tokens_of_their_ranks() -> None:
    table, choices = Table(), ((0,), (2,), (2, 1), (2, 0))
    ranks = np.argsort(-table.p, axis=1)
    found = paths(FixedTree(choices).grow(table, context_of([1])))
    third = int(ranks[1, 2])
    assert sorted(found) == sorted(
        [(int(ranks[1, 0]),), (third,), (third, int(ranks[third, 1])), (third, int(ranks[third, 0]))]
    )
    with pytest.raises(ValueError, match="ancestors"):
        FixedTree(((0, 1),))


def test_a_dynamic_tree_keeps_the_best_nodes_with_their_ancestors() -> None:
    table = Table()
    found = paths(DynamicTree(3, VOCAB, 9).grow(table, context_of([1])))
    every = [p for d in (1, 2, 3) for p in np.ndindex(*(VOCAB,) * d)]
    # The tree expands the best six nodes of a depth only; with so many the best nine of the whole tree are among them.
    best = sorted(every, key=lambda p: -path_probability(table.p, 1, p))[:9]
    assert sorted(found) == sorted(best)


def test_a_dynamic_tree_of_width_one_is_the_greedy_chain() -> None:
    context = context_of([1], [4])
    narrow, chain = DynamicTree(4, 1, 9).grow(Table(), context), Chain(4).grow(Table(), context)
    assert [paths(narrow, row) for row in (0, 1)] == [paths(chain, row) for row in (0, 1)]


def test_a_dynamic_tree_prunes_unlikely_nodes() -> None:
    table = Table()
    assert all(
        path_probability(table.p, 1, p) >= 0.2
        for p in paths(DynamicTree(3, 4, 30, min_score=0.2).grow(table, context_of([1])))
    )


def test_a_dynamic_tree_expands_where_a_child_may_be_kept() -> None:
    table, least = Table(), 0.1
    found = paths(DynamicTree(3, 4, 30, least).grow(table, context_of([1])))
    parents = {p[:-1] for p in found if len(p) > 1}
    assert parents and all(path_probability(table.p, 1, p) >= 1.5 * least for p in parents)
    assert any(path_probability(table.p, 1, p) < 1.5 * least for p in found if p not in parents)
    table.p[1] = 0.1 / (VOCAB - 1)
    table.p[1, 2] = 0.9
    assert paths(DynamicTree(3, 4, 30, min_score=0.8).grow(table, context_of([1]))) == [(2,)]


class CountedTable(Table):
    """Counts the nodes whose children it was asked for."""

    asked = 0

    def expand(self, tree: TokenTree, frontier: np.ndarray, context: Context) -> tuple[torch.Tensor, np.ndarray]:
        self.asked += frontier.size
        return super().expand(tree, frontier, context)


def test_a_dynamic_tree_expands_no_node_whose_children_would_all_be_dropped() -> None:
    one, all_ = CountedTable(), CountedTable()
    tree = DynamicTree(5, 4, 1).grow(one, context_of([1]))
    assert one.asked == 1 and paths(tree) == [(int(one.p[1].argmax()),)]
    best = sorted(paths(DynamicTree(5, VOCAB, 99).grow(all_, context_of([1]))), key=len)
    best = sorted(best, key=lambda p: -path_probability(all_.p, 1, p))[:4]
    few = CountedTable()
    assert sorted(paths(DynamicTree(5, VOCAB, 4).grow(few, context_of([1])))) == sorted(best)
    assert few.asked < all_.asked


def test_samples_keep_the_distribution_that_they_came_from() -> None:
    table = Table()
    tree = BranchingTree((2, 2)).grow(table, context_of([1], [2], sampling=SAMPLED))
    assert tree.q is not None
    for row in range(2):
        for node in range(1, tree.nodes):
            parent = int(tree.token[row, tree.parent[row, node]])
            distribution = tree.q[row, tree.q_index[row, node]].numpy()
            np.testing.assert_allclose(distribution, table.p[parent], atol=1e-12)


def test_drafters_take_turns_at_the_children_and_draft_first_below_their_own() -> None:
    one, other, shape = Table(seed=1), Table(seed=2), BranchingTree((2, 1))
    tree = shape.grow(DrafterUnion([one, other]), context_of([1]))
    first = int(one.p[1].argmax())
    second = next(t for t in np.argsort(-other.p[1]).tolist() if t != first)
    assert paths(tree) == [(first,), (second,), (first, one.p[first].argmax()), (second, other.p[second].argmax())]
    alone = shape.grow(DrafterUnion([one]), context_of([1]))
    assert paths(alone) == paths(BranchingTree((2, 1)).grow(one, context_of([1])))


@pytest.mark.exhaustive_types
def test_samples_of_two_drafters_are_distinct_and_each_has_the_distribution_of_its_drafter() -> None:
    one, other, counts, number = Table(3, seed=1), Table(3, seed=2), np.zeros((3, 3)), 3000
    context = context_of(*[[0]] * number, sampling=SAMPLED)
    tree = BranchingTree((2,)).grow(DrafterUnion([one, other]), context)
    np.add.at(counts, (tree.token[:, 1], tree.token[:, 2]), 1)
    p, q = one.p[0], other.p[0]
    expected = p[:, None] * q[None, :] / (1 - q[:, None]) * (1 - np.eye(3))
    np.testing.assert_allclose(counts / number, expected, atol=4 * 0.5 / number**0.5)
    assert tree.q is not None
    np.testing.assert_allclose(tree.q[0, tree.q_index[0, 1:]].numpy(), [p, q], atol=1e-12)


@pytest.mark.exhaustive_types
def test_samples_without_replacement_follow_the_distributions_of_the_drafter() -> None:
    table, counts, number = Table(3), np.zeros((3, 3)), 3000
    tree = BranchingTree((2,)).grow(table, context_of(*[[0]] * number, sampling=SAMPLED))
    np.add.at(counts, (tree.token[:, 1], tree.token[:, 2]), 1)
    p = table.p[0]
    expected = p[:, None] * p[None, :] / (1 - p[:, None]) * (1 - np.eye(3))
    np.testing.assert_allclose(counts / number, expected, atol=4 * 0.5 / number**0.5)


def best_value(budget: int, rates: Sequence[float], depth: int) -> float:
    """Sequoia's dynamic programme: expected accepted nodes of the best tree of `budget` nodes, given its root is
    accepted.
    """

    @cache
    def tree(nodes: int, left: int) -> float:
        return forest(nodes, 0, left) if left else 0.0

    @cache
    def forest(nodes: int, rank: int, left: int) -> float:
        if not nodes or rank == len(rates):
            return 0.0
        return max(
            forest(nodes, rank + 1, left),
            *(
                rates[rank] * (1 + tree(n - 1, left - 1)) + forest(nodes - n, rank + 1, left)
                for n in range(1, nodes + 1)
            ),
        )

    return tree(budget, depth)


@given(st.integers(0, 14), st.lists(st.floats(0.01, 0.3), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_optimal_tree_is_that_of_the_dynamic_programme(budget: int, rates: list[float], depth: int) -> None:
    rates = sorted(rates, reverse=True)
    tree = optimal_tree(budget, rates, depth)
    assert len(tree.choices) <= budget
    assert max((len(c) for c in tree.choices), default=0) <= depth
    expected = sum(prod(rates[rank] for rank in path) for path in tree.choices)
    assert 1 + expected == pytest.approx(1 + best_value(budget, rates, depth), abs=1e-12)


def test_optimal_takes_rates_per_depth_in_any_order() -> None:
    assert optimal_tree(3, [[0.1, 0.6], [0.9]]).choices == ((1,), (1, 0), (1, 0, 0))
    with pytest.raises(ValueError, match="sum to at most 1"):
        optimal_tree(3, [0.9, 0.9])


continuations = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=6)


@given(continuations, st.integers(0, 10), st.integers(0, 6), st.data())
@settings(max_examples=150, deadline=None)
def test_a_trie_holds_the_likeliest_prefixes_and_all_of_theirs(
    lists: list[list[int]], budget: int, max_depth: int, data: st.DataObject
) -> None:
    given_continuations = []
    for tokens in lists:
        rates = data.draw(st.lists(st.sampled_from([0.3, 0.5, 1.0]), min_size=len(tokens), max_size=len(tokens)))
        given_continuations.append(Continuation(tuple(tokens), tuple(np.cumprod(rates).tolist())))
    tree = Trie(budget).grow(FixedRetriever(given_continuations), context_of([1], max_depth=max_depth))
    well_formed(tree)
    found = paths(tree)
    chances: dict[tuple[int, ...], float] = {}
    for c in given_continuations:
        for i in range(min(len(c.tokens), max_depth)):
            chances[c.tokens[: i + 1]] = max(c.cumulative_acceptance[i], chances.get(c.tokens[: i + 1], 0))
    assert len(found) == len(set(found)) == min(budget, len(chances))
    assert all(p[:-1] in found for p in found if len(p) > 1)
    rest = [v for p, v in chances.items() if p not in found]
    assert not found or not rest or min(chances[p] for p in found) >= max(rest)


def test_a_trie_leaves_out_unlikely_tokens() -> None:
    tree = Trie(9, min_probability=0.3).grow(
        FixedRetriever([Continuation((1, 2, 0), (0.9, 0.4, 0.1))]), context_of([1])
    )
    assert paths(tree) == [(1,), (1, 2)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Chain(-1), "0 or more"),
        (lambda: Chain(2, confidence=1.5), "confidence"),
        (lambda: BranchingTree((2, 0)), "at least one branch"),
        (lambda: DynamicTree(0, 1, 1), "at least 1"),
        (lambda: Trie(-1), "0 or more"),
        (lambda: optimal_tree(-1, [0.5]), "0 or more"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("draft", "tree", "words"),
    [
        (PromptLookup(), Chain(3), "Chain needs a Predictor, and PromptLookup is not one; try Trie"),
        (Table(), Trie(3), "Trie needs a Retriever, and Table is not one; try Chain"),
        (NoDrafter(), DynamicTree(1, 1, 1), "DynamicTree needs a Predictor, and NoDrafter is not one; try RootOnly"),
    ],
)
def test_a_shape_refuses_the_wrong_kind_of_drafter(draft: Drafter, tree: Shape[Drafter], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Method(draft, tree, Match())
    Method(draft, RootOnly(), Match())


def test_merged_trees_hold_every_path_of_both_once() -> None:
    first = tree_from_lists([[1, 2, 3, 4], [1, 5]], [[-1, 0, 1, 0], [-1, 0]])
    second = tree_from_lists([[1, 2, 6, 3], [1]], [[-1, 0, 1, 1], [-1]])
    both = merge_trees(first, second)

    def paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
        valid = np.nonzero(tree.valid[row])[0].tolist()
        return [tuple(int(tree.token[row, n]) for n in tree.ancestors(row, node)) for node in valid]

    for row in (0, 1):
        found = paths(both, row)
        assert len(found) == len(set(found)) and set(found) == {*paths(first, row), *paths(second, row)}
    assert both.token[0].tolist() == [1, 2, 3, 4, 6]


def test_concatenated_trees_keep_how_their_siblings_were_sampled() -> None:
    context = context_of([1], [2], sampling=SAMPLED)
    with_, without = (
        BranchingTree((2, 2), distinct=d).grow(Table(), context.select([i])) for i, d in enumerate((False, True))
    )
    both = concatenate_trees([with_, without])
    assert both.distinct.tolist() == [False, True]
    assert both.select(np.array([1, 0])).with_prefix([[5, 2], [4, 3, 1]]).distinct.tolist() == [True, False]


def test_trees_with_different_probe_embeddings_are_refused() -> None:
    one, two = (replace(tree_from_lists([[1]], [[-1]]), probe_embeddings=torch.zeros(2, 3)) for _ in range(2))
    assert concatenate_trees([one, tree_from_lists([[1]], [[-1]]), one]).probe_embeddings is one.probe_embeddings
    with pytest.raises(ValueError, match="trees with different probe embeddings cannot be in one pass"):
        concatenate_trees([one, two])


@pytest.mark.parametrize(
    ("sampling", "confidence"), [(SamplingParams(), 0.4), (SAMPLED, 0.15)], ids=["argmax", "sampled"]
)
def test_a_tree_is_not_written_to_once_it_is_made(
    sampling: SamplingParams, confidence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TreeBuilder.add

    def frozen(self: TreeBuilder, *given: np.ndarray) -> None:
        real(self, *given)
        self.tree.valid.flags.writeable = False

    monkeypatch.setattr(TreeBuilder, "add", frozen)
    tree = Chain(4, confidence=confidence).grow(Table(), context_of([1, 2], [3], [5], [0], sampling=sampling))
    assert len(set(tree.valid.sum(1).tolist())) > 1, "some chains stopped early"


@pytest.mark.parametrize("width", [1, 3, 5])
def test_beam_search_keeps_the_best_sequences_of_every_length(width: int) -> None:
    table, depth = Table(), 4
    context = context_of([1, 2], [3], [4, 4, 5])
    context.max_depth[:] = [9, 2, 0]
    tree = BeamSearch(depth, width).grow(table, context)
    well_formed(tree)
    for row, (root, length) in enumerate(((2, depth), (3, 2))):
        beams: list[tuple[int, ...]] = [()]
        for _ in range(length):
            longer = [(*beam, token) for beam in beams for token in range(VOCAB)]
            beams = sorted(longer, key=lambda path: -path_probability(table.p, root, path))[:width]
        beginnings = {beam[:n] for beam in beams for n in range(1, length + 1)}
        found = paths(tree, row)
        assert set(found) == beginnings and len(found) == len(beginnings)
    assert paths(tree, 2) == []
    assert tree.nodes == 1 + max(map(len, (paths(tree, row) for row in range(3)))), "as many as the cache must hold"


def test_parallel_chains_of_many_tokens_are_planned_at_once() -> None:
    shape, begun = BranchingTree((64, *[1] * 255), distinct=False), time.process_time()
    tree = shape.grow(Table(), context_of([1], max_depth=2, sampling=SAMPLED))
    assert time.process_time() - begun < 10, "each node is looked at once, not for every node of a level"
    assert [len(path) for path in paths(tree)] == [1] * 64 + [2] * 64


def test_a_beam_of_no_width_is_refused() -> None:
    with pytest.raises(ValueError, match="beam search needs a depth and a width of at least 1, found 3 and 0"):
        BeamSearch(3, 0)


@pytest.mark.parametrize("which", [[0, 1, 2], [2, 0, 1], [2, 0], [1]])
def test_trees_of_some_requests_in_any_order_become_those_of_all(which: list[int]) -> None:
    roots = [10, 11, 12]
    tree = tree_from_lists([[roots[i], 20 + i] for i in which], [[-1, 0]] * len(which), [[1.0, 0.5]] * len(which))
    whole = tree.spread(roots, which)
    assert whole.token[:, 0].tolist() == roots
    assert [row[1] for row in whole.token.tolist()] == [20 + i if i in which else 0 for i in range(3)]
    assert whole.drafted_counts == [int(i in which) for i in range(3)]
