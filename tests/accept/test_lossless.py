"""Lossless acceptors by enumeration of all random choices: they are exact, and well-known mistakes are not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from exact import (
    Chooser,
    Prefix,
    RejectionByTests,
    ScriptedDistributions,
    completed,
    distance,
    outcome_distribution,
    random_distribution,
    sequence_distribution,
    tree_of,
)
from foretell.accept import (
    Acceptor,
    AcceptResult,
    BlockVerification,
    GreedyBlockVerification,
    KSequentialSelection,
    Match,
    Rejection,
    TraversalVerification,
)
from foretell.accept.rejection import residual
from foretell.core import draft_tests
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions

PrefixDistribution = Callable[[Prefix], np.ndarray]
Nodes = dict[int, tuple[int, int, int]]
seeds = pytest.mark.parametrize("seed", range(4))
few_seeds = pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 4))])
ON_CHAINS = {
    "match": Match(),
    "rejection": Rejection(),
    "rejection at all nodes": RejectionByTests(draft_tests.test_drafts),
    "block": BlockVerification(),
    "greedy block": GreedyBlockVerification(),
    "traversal": TraversalVerification(),
}
SIBLING_TESTS = {name: rule for name, rule in ON_CHAINS.items() if "block" not in name}
on_chains = pytest.mark.parametrize("acceptor", ON_CHAINS.values(), ids=ON_CHAINS.keys())


@dataclass(frozen=True)
class Sampler:
    """Samples trees from a drafter's distributions by a chooser."""

    q: PrefixDistribution
    chooser: Chooser

    def chain(self, length: int, stop: int = -1) -> TokenTree:
        """A chain that ends with the token `stop`."""
        nodes, distributions, text = Nodes(), list[np.ndarray](), list[int]()
        for depth in range(length):
            distributions.append(self.q(tuple(text)))
            text.append(self.chooser.choose(distributions[-1].tolist()))
            nodes[depth + 1] = (depth, text[-1], depth)
            if text[-1] == stop:
                break
        return tree_of(nodes, distributions)

    def siblings(self, count: int, distinct: bool = False) -> TokenTree:
        """Some samples of the first token, and one more token below the last of them."""
        left, nodes, token = self.q(()).copy(), Nodes(), 0
        for _ in range(count):
            if left.sum() == 0:
                break
            token = self.chooser.choose(left.tolist())
            nodes[len(nodes) + 1] = (0, token, 0)
            left[token] *= not distinct
        below = self.q((token,))
        nodes[len(nodes) + 1] = (len(nodes), self.chooser.choose(below.tolist()), 1)
        return tree_of(nodes, [self.q(()), below], distinct)

    def tree(self, widths: Sequence[int], distinct: bool = False, keep: int | None = None) -> TokenTree:
        """`widths[i]` samples below every node at depth `i`; of the tree the first `keep` nodes, in order of depth."""
        nodes, distributions, level = Nodes(), list[np.ndarray](), [(0, Prefix())]
        for width in widths:
            above, level = level, []
            for parent, text in above:
                left = self.q(text).copy()
                distributions.append(self.q(text))
                for _ in range(width):
                    if left.sum() == 0 or len(nodes) == keep:
                        break
                    token = self.chooser.choose(left.tolist())
                    nodes[len(nodes) + 1] = (parent, token, len(distributions) - 1)
                    level.append((len(nodes), (*text, token)))
                    left[token] *= not distinct
        return tree_of(nodes, distributions, distinct)


def check(
    acceptor: Acceptor, grow: Callable[[Sampler], TokenTree], seed: int, vocab: int = 3, length: int = 3
) -> float:
    """Total variation distance of the sequences from the target's."""
    p, q = random_distribution(vocab, seed), random_distribution(vocab, seed + 100)
    return distance(sequence_distribution(acceptor, lambda chooser: grow(Sampler(q, chooser)), p, length), p)


@seeds
@on_chains
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_chains_are_exact(acceptor: Acceptor, length: int, seed: int) -> None:
    assert check(acceptor, lambda sampler: sampler.chain(length), seed, length=4) < 1e-12


@seeds
@on_chains
def test_chains_that_end_with_an_unsure_token_are_exact(acceptor: Acceptor, seed: int) -> None:
    assert check(acceptor, lambda sampler: sampler.chain(3, stop=1), seed) < 1e-12


@few_seeds
@pytest.mark.parametrize("distinct", [False, True], ids=["independent", "without replacement"])
@pytest.mark.parametrize("acceptor", SIBLING_TESTS.values(), ids=SIBLING_TESTS.keys())
def test_several_samples_of_one_token_are_exact(acceptor: Acceptor, distinct: bool, seed: int) -> None:
    assert check(acceptor, lambda sampler: sampler.siblings(2, distinct), seed, vocab=4) < 1e-12
    assert check(acceptor, lambda sampler: sampler.siblings(3, distinct), seed) < 1e-12


@seeds
def test_independent_samples_of_several_drafters_are_exact_as_separate_tests(seed: int) -> None:
    p, one, other = (random_distribution(3, seed + i) for i in (0, 100, 200))

    def trials(chooser: Chooser) -> TokenTree:
        distributions = [one(()), other(())]
        return tree_of(
            {i + 1: (0, chooser.choose(distribution.tolist()), i) for i, distribution in enumerate(distributions)},
            distributions,
        )

    assert distance(sequence_distribution(Rejection(), trials, p, 2), p) < 1e-12


@dataclass(frozen=True)
class Merged:
    """Two drafters that take turns at the children of every node, without replacement."""

    p: PrefixDistribution
    drafters: tuple[PrefixDistribution, PrefixDistribution]
    widths: tuple[int, ...]
    once: bool = True
    """Whether no sibling has the token of an earlier one, whoever drafted that."""

    def grow(self, chooser: Chooser) -> TokenTree:
        nodes, distributions, level = Nodes(), list[np.ndarray](), [(0, Prefix(), 0)]
        for width in self.widths:
            above, level = level, []
            for parent, text, turn in above:
                left = [q(text).copy() for q in self.drafters]
                distributions += [q(text) for q in self.drafters]
                for i in range(width):
                    which = (turn + i) % 2
                    if left[which].sum() == 0:
                        continue
                    token = chooser.choose(left[which].tolist())
                    nodes[len(nodes) + 1] = (parent, token, len(distributions) - 2 + which)
                    level.append((len(nodes), (*text, token), turn + i))
                    for q in left if self.once else (left[which],):
                        q[token] = 0
        return tree_of(nodes, distributions, distinct=True)

    def distance(self, acceptor: Acceptor, length: int) -> float:
        return distance(sequence_distribution(acceptor, self.grow, self.p, length), self.p)


BY_SOURCE = {name: ON_CHAINS[name] for name in ("rejection", "rejection at all nodes", "traversal")}


@few_seeds
@pytest.mark.parametrize("widths", [(2,), (3,), (2, 1)])
@pytest.mark.parametrize("acceptor", BY_SOURCE.values(), ids=BY_SOURCE.keys())
def test_merged_trees_of_two_drafters_are_exact(acceptor: Acceptor, widths: tuple[int, ...], seed: int) -> None:
    p, one, other = (random_distribution(3, seed + i) for i in (0, 100, 200))
    assert Merged(p, (one, other), widths).distance(acceptor, 3) < 1e-12


def test_a_token_that_two_drafters_draw_independently_is_not_tested_as_if_they_had_not() -> None:
    p, one, other = (random_distribution(3, seed) for seed in (1, 101, 201))
    assert Merged(p, (one, other), (2,)).distance(Rejection(), 2) < 1e-12
    assert Merged(p, (one, other), (2,), once=False).distance(Rejection(), 2) > 0.01


@seeds
@pytest.mark.parametrize("acceptor", [Match(), Rejection()], ids=["match", "rejection"])
def test_sampled_and_other_children_of_one_node_are_exact(acceptor: Acceptor, seed: int) -> None:
    def grow(sampler: Sampler) -> TokenTree:
        q = sampler.q(())
        return tree_of(
            {1: (0, 2, -1), 2: (0, sampler.chooser.choose(q.tolist()), 0), 3: (0, 0, -1), 4: (1, 1, -1)}, [q]
        )

    assert check(acceptor, grow, seed) < 1e-12


def expected_drafts(
    acceptor: Acceptor, grow: Callable[[Sampler], TokenTree], p: PrefixDistribution, q: PrefixDistribution
) -> float:
    """Expected number of accepted drafts."""

    def run(chooser: Chooser) -> int:
        tree = grow(Sampler(q, chooser))
        return len(acceptor.accept(tree, 0, ScriptedDistributions(tree, p, chooser)).path)

    return sum(length * chance for length, chance in outcome_distribution(run).items())


@seeds
def test_block_verification_accepts_no_less_than_token_by_token(seed: int) -> None:
    p, q = random_distribution(3, seed), random_distribution(3, seed + 100)
    token, block, greedy, traversal = (
        expected_drafts(acceptor, lambda sampler: sampler.chain(3), p, q)
        for acceptor in (Rejection(), BlockVerification(), GreedyBlockVerification(), TraversalVerification())
    )
    assert block >= token - 1e-12
    assert greedy == pytest.approx(block, abs=1e-12) and traversal == pytest.approx(block, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.6, 0.3, 0.1, 0.0], [0.2, 0.3, 0.4, 0.1]),
        ([0.6, 0.3, 0.1, 0.0], [0.6, 0.3, 0.1, 0.0]),
        ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
    ],
    ids=["overlapping", "equal", "disjoint"],
)
def test_a_chain_under_a_constant_acceptance_has_the_length_of_the_closed_form(p: list[float], q: list[float]) -> None:
    beta = np.minimum(p, q).sum()
    accepted = expected_drafts(Rejection(), lambda s: s.chain(3), lambda _: np.array(p), lambda _: np.array(q))
    assert accepted == pytest.approx(beta + beta**2 + beta**3, abs=1e-12)


def uniform(prefix: Prefix) -> np.ndarray:
    return np.full(3, 1 / 3)


def one_hot(prefix: Prefix) -> np.ndarray:
    p: np.ndarray = np.eye(3)[(len(prefix) + sum(prefix)) % 3]
    return p


def halves(prefix: Prefix) -> np.ndarray:
    """Two equal tokens and one of probability 0."""
    return np.roll([0.5, 0.5, 0.0], sum(prefix) % 3)


SPECIAL = {"flat": uniform, "one-hot": one_hot, "halves": halves, "random": random_distribution(3, 7)}


@dataclass(frozen=True)
class Sizes:
    """A tree with fixed branching."""

    widths: tuple[int, ...]
    distinct: bool = False

    def grow(self, sampler: Sampler) -> TokenTree:
        return sampler.tree(self.widths, self.distinct)


CHAINS = Sizes((2, 1)), Sizes((3,)), Sizes((2, 1, 1)), Sizes((3, 1))
TREES = Sizes((2, 2), True), Sizes((2, 2)), Sizes((2, 1, 2), True)
LONG = (GreedyBlockVerification, CHAINS[2]), (TraversalVerification, TREES[2])
BY_TREE = [
    pytest.param(rule, tree, marks=pytest.mark.exhaustive if (type(rule), tree) in LONG else ())
    for rule, trees in ((GreedyBlockVerification(), CHAINS), (TraversalVerification(), (*CHAINS, *TREES)))
    for tree in trees
]


def named(value: object) -> str:
    if isinstance(value, Sizes):
        return f"{'distinct' if value.distinct else 'independent'} {value.widths}"
    return type(value).__name__ if isinstance(value, Acceptor) else str(value)


@pytest.mark.parametrize(("acceptor", "tree"), BY_TREE, ids=named)
def test_joint_tests_of_trees_are_exact(acceptor: Acceptor, tree: Sizes) -> None:
    small = tree in (CHAINS[0], CHAINS[1], TREES[0])
    assert max(check(acceptor, tree.grow, seed) for seed in ((0, 1) if small else (1,))) < 1e-12


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("acceptor", "tree"),
    [
        (GreedyBlockVerification(), CHAINS[0]),
        (TraversalVerification(), CHAINS[0]),
        (TraversalVerification(), TREES[0]),
    ],
    ids=named,
)
@pytest.mark.parametrize(("target", "drafter"), [(t, d) for t in SPECIAL for d in SPECIAL])
def test_joint_tests_of_ties_zeros_and_equal_distributions_are_exact(
    acceptor: Acceptor, tree: Sizes, target: str, drafter: str
) -> None:
    p, q = SPECIAL[target], SPECIAL[drafter]
    found = sequence_distribution(acceptor, lambda chooser: tree.grow(Sampler(q, chooser)), p, 2)
    assert distance(found, p) < 1e-12


@few_seeds
@pytest.mark.parametrize(
    ("acceptor", "tree"),
    [
        (Rejection(), TREES[0]),
        (Rejection(), CHAINS[0]),
        (KSequentialSelection(), CHAINS[0]),
        (GreedyBlockVerification(), CHAINS[0]),
        (TraversalVerification(), CHAINS[0]),
        (TraversalVerification(), TREES[0]),
    ],
    ids=named,
)
def test_a_budget_that_cuts_trees_at_random_keeps_them_exact(acceptor: Acceptor, tree: Sizes, seed: int) -> None:
    """How many nodes are kept is decided before any token is drawn."""

    def grow(sampler: Sampler) -> TokenTree:
        keep = sampler.chooser.choose([1.0] * 5)
        return sampler.tree(tree.widths, tree.distinct, keep)

    assert check(acceptor, grow, seed) < 1e-12


class EndsAtOne(ScriptedDistributions):
    """A target whose answers end with token 1."""

    def goes_on(self, row: int, node: int) -> bool:
        return node == 0 or self._tree.token[row, node] != 1


@seeds
@pytest.mark.parametrize("acceptor", [GreedyBlockVerification(), TraversalVerification()], ids=["greedy", "traversal"])
def test_drafts_that_end_the_answer_keep_joint_tests_exact(acceptor: Acceptor, seed: int) -> None:
    p, q = random_distribution(3, seed), random_distribution(3, seed + 100)

    def run(chooser: Chooser) -> Prefix:
        tree = Sampler(q, chooser).tree((2, 1))
        result = acceptor.accept(tree, 0, EndsAtOne(tree, p, chooser))
        text = (*(int(tree.token[0, n]) for n in result.path), result.token)
        assert 1 not in text[:-1]
        return text

    texts = outcome_distribution(run)
    whole: dict[Prefix, float] = {}
    for text, chance in texts.items():
        for sequence, part in completed(text[:3], chance, p, 3).items():
            whole[sequence] = whole.get(sequence, 0) + part
    assert distance(whole, p) < 1e-12


@few_seeds
def test_what_joint_tests_accept_of_the_same_tree(seed: int) -> None:
    p, q = random_distribution(3, seed), random_distribution(3, seed + 100)

    def drafts(acceptor: Acceptor, *widths: int, distinct: bool = False) -> float:
        return expected_drafts(acceptor, lambda sampler: sampler.tree(widths, distinct), p, q)

    greedy, traversal = GreedyBlockVerification(), TraversalVerification()
    others = drafts(Rejection(), 2, 1), drafts(KSequentialSelection(), 2, 1), drafts(BlockVerification(), 1, 1)
    assert drafts(greedy, 2, 1) > max(others)
    assert drafts(traversal, 2, 2, distinct=True) >= drafts(Rejection(), 2, 2, distinct=True) - 1e-12
    assert drafts(traversal, 3, distinct=True) == pytest.approx(drafts(Rejection(), 3, distinct=True), abs=1e-12)


@dataclass(frozen=True)
class Hierarchical(Acceptor):
    """HSD (arXiv 2601.05724) on a chain: the whole draft first, then one step back after the other.

    `capped`: the last test is that of the others, w; released is min(1, r), the ratio of the whole draft.
    """

    capped: bool
    lossless = False
    same_seed = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        assert tree.q is not None
        length, ratio, w = tree.nodes - 1, [1.0], [1.0]
        p = [distributions.probabilities(0, i) for i in range(length + 1)]
        q = [tree.q[0, i] for i in range(length)]
        for i in range(length):
            token = int(tree.token[0, i + 1])
            ratio.append(ratio[-1] * float(p[i][token] / q[i][token]))
            w.append(ratio[-1] / max(1.0, *ratio))
        if distributions.uniform(row, length, Stream.ACCEPT) < (w[-1] if self.capped else min(1.0, ratio[-1])):
            return AcceptResult(tuple(range(1, length + 1)), distributions.sample(row, length))
        for i in range(length - 1, -1, -1):
            plus, minus = (w[i] * p[i] - q[i]).clamp_min(0), (q[i] - w[i] * p[i]).clamp_min(0)
            if distributions.uniform(row, i, Stream.ACCEPT) * float(max(plus.sum(), minus.sum())) < float(plus.sum()):
                break
        left = plus if plus.sum() > 0 else p[i]
        return AcceptResult(tuple(range(1, i + 1)), sample_from(left, distributions.uniform(row, i, Stream.RESIDUAL)))


def test_the_released_last_test_of_hierarchical_decoding_is_biased_and_its_capped_form_is_block_verification() -> None:
    def grow(sampler: Sampler) -> TokenTree:
        return sampler.chain(3)

    assert max(check(Hierarchical(capped=False), grow, seed) for seed in range(4)) > 0.01
    for seed in range(4):
        p, q = random_distribution(3, seed), random_distribution(3, seed + 100)
        capped, block = (
            outcomes(acceptor, grow, p, q) for acceptor in (Hierarchical(capped=True), BlockVerification())
        )
        assert check(Hierarchical(capped=True), grow, seed) < 1e-12
        assert capped == pytest.approx(block, abs=1e-12)


def outcomes(
    acceptor: Acceptor, grow: Callable[[Sampler], TokenTree], p: PrefixDistribution, q: PrefixDistribution
) -> dict[tuple[int, Prefix], float]:
    """Probability of every number of accepted drafts with every text, the drafts and the token after them."""

    def run(chooser: Chooser) -> tuple[int, Prefix]:
        tree = grow(Sampler(q, chooser))
        result = acceptor.accept(tree, 0, ScriptedDistributions(tree, p, chooser))
        return len(result.path), (*(int(tree.token[0, n]) for n in result.path), result.token)

    return {key: chance for key, chance in sorted(outcome_distribution(run).items()) if chance > 1e-15}


@seeds
def test_the_acceptance_probability_is_the_overlap_of_the_distributions(seed: int) -> None:
    p, q = random_distribution(4, seed), random_distribution(4, seed + 100)

    def run(chooser: Chooser) -> int:
        tree = Sampler(q, chooser).chain(1)
        return len(Rejection().accept(tree, 0, ScriptedDistributions(tree, p, chooser)).path)

    assert outcome_distribution(run).get(1, 0.0) == pytest.approx(np.minimum(p(()), q(())).sum(), abs=1e-12)


@pytest.mark.parametrize(
    ("acceptor", "nodes", "distinct", "words"),
    [
        (BlockVerification(), {1: (0, 1, 0), 2: (0, 2, 0)}, False, "use Chain as shape, or Rejection as acceptor"),
        (GreedyBlockVerification(), {1: (0, 1, 0), 2: (0, 2, 0)}, True, "drawn without replacement: use Branching"),
        (GreedyBlockVerification(), {1: (0, 1, 0), 2: (1, 2, 0), 3: (1, 1, 0)}, False, "branches below its root"),
        (TraversalVerification(), {1: (0, 1, 0), 2: (0, 2, 1)}, False, "from several: use Rejection as acceptor"),
    ],
    ids=["branches", "without replacement", "branches below", "several distributions"],
)
def test_trees_for_which_a_rule_does_not_hold_are_refused_in_one_sentence(
    acceptor: Acceptor, nodes: Nodes, distinct: bool, words: str
) -> None:
    tree = tree_of(nodes, [uniform(())] * 2, distinct)
    with pytest.raises(ValueError, match=words):
        acceptor.accept(tree, 0, ScriptedDistributions(tree, random_distribution(3, 0), Chooser([])))


class Altered(Acceptor):
    """Rejection on an altered tree."""

    lossless = False
    same_seed = False

    def __init__(self, alter: Callable[[TokenTree], TokenTree]) -> None:
        self._alter = alter

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        return Rejection().accept(self._alter(tree), row, distributions)


def merged(tree: TokenTree) -> TokenTree:
    """Equal siblings become one test: the later ones are not valid."""
    valid = tree.valid.copy()
    for node in range(1, tree.nodes):
        twins = (tree.token[0, :node] == tree.token[0, node]) & (tree.parent[0, :node] == tree.parent[0, node])
        valid[0, node] &= not twins[1:].any()
    return replace(tree, valid=valid)


def test_merging_equal_samples_into_one_test_is_biased_and_keeping_them_is_not() -> None:
    def grow(sampler: Sampler) -> TokenTree:
        q = sampler.q(())
        return tree_of({i: (0, sampler.chooser.choose(q.tolist()), 0) for i in (1, 2, 3)}, [q])

    assert max(check(Altered(merged), grow, seed, length=1) for seed in range(6)) > 0.01
    assert max(check(Rejection(), grow, seed, length=1) for seed in range(6)) < 1e-12


def test_testing_argmax_children_against_the_drafters_softmax_is_biased_and_as_one_hot_is_not() -> None:
    def grow(sampler: Sampler) -> TokenTree:
        q = sampler.q(())
        best = np.argsort(-q)[:2].tolist()
        return tree_of({i + 1: (0, token, -1) for i, token in enumerate(best)}, [q])

    def softmax(tree: TokenTree) -> TokenTree:
        return replace(tree, q_index=np.where(tree.parent >= 0, 0, -1))

    assert max(check(Altered(softmax), grow, seed, length=1) for seed in range(6)) > 0.1
    assert max(check(Rejection(), grow, seed, length=1) for seed in range(6)) < 1e-12


def test_testing_samples_without_replacement_as_independent_is_biased() -> None:
    def forgetful(tree: TokenTree) -> TokenTree:
        return replace(tree, distinct=np.array([False]))

    distances = [
        check(Altered(forgetful), lambda sampler: sampler.siblings(2, distinct=True), seed, length=2)
        for seed in range(6)
    ]
    assert max(distances) > 0.01


class RedrawPerLeaf(Acceptor):
    """Samples from the target once per child and takes the first child that matches; then samples again."""

    lossless = False
    same_seed = False

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        path, node, children = list[int](), 0, tree.children(row)
        while hit := [c for c in children.get(node, ()) if distributions.sample(row, node) == tree.token[row, c]][:1]:
            node = hit[0]
            path.append(node)
        return AcceptResult(tuple(path), distributions.sample(row, node))


def test_sampling_again_for_every_leaf_is_biased_and_one_sample_per_node_is_not() -> None:
    def grow(sampler: Sampler) -> TokenTree:
        return tree_of({1: (0, 0, -1), 2: (0, 1, -1), 3: (1, 1, -1)}, [])

    assert max(check(RedrawPerLeaf(), grow, seed) for seed in range(6)) > 0.05
    assert max(check(Match(), grow, seed) for seed in range(6)) < 1e-12


def test_residuals() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert residual(p, q).tolist() == [0.5, 0.5, 0.0]
    assert residual(p, p).tolist() == p.tolist()
