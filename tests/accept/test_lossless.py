"""Lossless acceptors by enumeration of all random choices: they are exact, and well-known mistakes are not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from exact import (
    Chooser,
    Prefix,
    ScriptedDistributions,
    distance,
    outcome_distribution,
    random_distribution,
    sequence_distribution,
    tree_of,
)
from foretell.accept import Acceptor, AcceptResult, BlockVerification, Match, Rejection
from foretell.accept.rejection import residual
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions

PrefixDistribution = Callable[[Prefix], np.ndarray]
Nodes = dict[int, tuple[int, int, int]]
seeds = pytest.mark.parametrize("seed", range(4))


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


def check(
    acceptor: Acceptor, grow: Callable[[Sampler], TokenTree], seed: int, vocab: int = 3, length: int = 3
) -> float:
    """Total variation distance of the sequences from the target's."""
    p, q = random_distribution(vocab, seed), random_distribution(vocab, seed + 100)
    return distance(sequence_distribution(acceptor, lambda chooser: grow(Sampler(q, chooser)), p, length), p)


@seeds
@pytest.mark.parametrize("acceptor", [Match(), Rejection(), BlockVerification()], ids=["match", "rejection", "block"])
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_chains_are_exact(acceptor: Acceptor, length: int, seed: int) -> None:
    assert check(acceptor, lambda sampler: sampler.chain(length), seed, length=4) < 1e-12


@seeds
@pytest.mark.parametrize("acceptor", [Match(), Rejection(), BlockVerification()], ids=["match", "rejection", "block"])
def test_chains_that_end_with_an_unsure_token_are_exact(acceptor: Acceptor, seed: int) -> None:
    assert check(acceptor, lambda sampler: sampler.chain(3, stop=1), seed) < 1e-12


@seeds
@pytest.mark.parametrize("distinct", [False, True], ids=["independent", "without replacement"])
@pytest.mark.parametrize("acceptor", [Match(), Rejection()], ids=["match", "rejection"])
def test_several_samples_of_one_token_are_exact(acceptor: Acceptor, distinct: bool, seed: int) -> None:
    assert check(acceptor, lambda sampler: sampler.siblings(2, distinct), seed, vocab=4) < 1e-12
    assert check(acceptor, lambda sampler: sampler.siblings(3, distinct), seed) < 1e-12


@seeds
def test_samples_of_several_drafters_are_exact_as_a_mixture_and_as_separate_tests(seed: int) -> None:
    p, one, other = (random_distribution(3, seed + i) for i in (0, 100, 200))

    def mixed(prefix: Prefix) -> np.ndarray:
        return 0.25 * one(prefix) + 0.75 * other(prefix)

    def trials(chooser: Chooser) -> TokenTree:
        distributions = [one(()), other(())]
        return tree_of(
            {i + 1: (0, chooser.choose(distribution.tolist()), i) for i, distribution in enumerate(distributions)},
            distributions,
        )

    merged = sequence_distribution(Rejection(), lambda chooser: Sampler(mixed, chooser).siblings(2), p, 3)
    assert distance(merged, p) < 1e-12
    assert distance(sequence_distribution(Rejection(), trials, p, 2), p) < 1e-12


@seeds
@pytest.mark.parametrize("acceptor", [Match(), Rejection()], ids=["match", "rejection"])
def test_sampled_and_other_children_of_one_node_are_exact(acceptor: Acceptor, seed: int) -> None:
    def grow(sampler: Sampler) -> TokenTree:
        q = sampler.q(())
        return tree_of(
            {1: (0, 2, -1), 2: (0, sampler.chooser.choose(q.tolist()), 0), 3: (0, 0, -1), 4: (1, 1, -1)}, [q]
        )

    assert check(acceptor, grow, seed) < 1e-12


@seeds
def test_block_verification_accepts_no_less_than_token_by_token(seed: int) -> None:
    p, q = random_distribution(3, seed), random_distribution(3, seed + 100)

    def accepted(acceptor: Acceptor) -> float:
        def run(chooser: Chooser) -> int:
            tree = Sampler(q, chooser).chain(3)
            return len(acceptor.accept(tree, 0, ScriptedDistributions(tree, p, chooser)).path)

        return sum(length * chance for length, chance in outcome_distribution(run).items())

    assert accepted(BlockVerification()) >= accepted(Rejection()) - 1e-12


@seeds
def test_the_acceptance_probability_is_the_overlap_of_the_distributions(seed: int) -> None:
    p, q = random_distribution(4, seed), random_distribution(4, seed + 100)

    def run(chooser: Chooser) -> int:
        tree = Sampler(q, chooser).chain(1)
        return len(Rejection().accept(tree, 0, ScriptedDistributions(tree, p, chooser)).path)

    assert outcome_distribution(run).get(1, 0.0) == pytest.approx(np.minimum(p(()), q(())).sum(), abs=1e-12)


def test_block_verification_refuses_trees_in_one_sentence() -> None:
    tree = tree_of({1: (0, 1, -1), 2: (0, 2, -1)}, [])
    with pytest.raises(ValueError, match="use Chain as shape, or Rejection as acceptor"):
        BlockVerification().accept(tree, 0, ScriptedDistributions(tree, random_distribution(3, 0), Chooser([])))


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
