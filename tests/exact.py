"""Exact distributions of randomised code, by enumeration of all outcomes of its random choices."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from foretell.accept import Acceptor, Rejection
from foretell.core.context import Context
from foretell.core.draft_tests import NodeDrafts, NodeTests
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.distributions.processed import ProcessedDistributions

T = TypeVar("T")
Prefix = tuple[int, ...]


class Chooser:
    """Makes choices by a script, then the first possible ones; records the alternatives."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script, self._taken = script, list[int]()
        self.chance = 1.0
        self.untaken: list[list[int]] = []

    def choose(self, weights: Sequence[float]) -> int:
        """One of the alternatives that have a weight."""
        possible = [i for i, w in enumerate(weights) if w > 0]
        new = len(self._taken) >= len(self._script)
        choice = possible[0] if new else self._script[len(self._taken)]
        if new:
            self.untaken += [[*self._taken, other] for other in possible[1:]]
        self._taken.append(choice)
        self.chance *= weights[choice] / sum(weights)
        return choice


def outcome_distribution(run: Callable[[Chooser], T]) -> dict[T, float]:
    """Probability of every result of `run`."""
    chances: dict[T, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = Chooser(scripts.pop())
        result = run(chooser)
        chances[result] += chooser.chance
        scripts += chooser.untaken
    return dict(chances)


class Uniform(float):
    """A random number in [0, 1) without a value: each comparison or quantile of it is a choice of the chooser."""

    def __new__(cls, chooser: Chooser) -> "Uniform":
        self = super().__new__(cls, 0.5)
        self.chooser, self.scale = chooser, 1.0
        return self

    chooser: Chooser
    scale: float

    def __mul__(self, factor: float) -> "Uniform":
        out = Uniform(self.chooser)
        out.scale = self.scale * float(factor)
        return out

    def __lt__(self, bound: float) -> bool:
        below = min(1.0, max(0.0, float(bound) / self.scale)) if self.scale > 0 else float(bound > 0)
        return self.chooser.choose([1 - below, below]) == 1

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any], kwargs: Any = None) -> Any:
        """The operations of `sample_from`: scaling by the total, and a search in the cumulative sums."""
        self = next(a for a in args if isinstance(a, Uniform))
        if "mul" in function.__name__:
            return self
        assert function is torch.searchsorted
        return torch.tensor(self.chooser.choose(torch.diff(args[0], prepend=args[0].new_zeros(1)).tolist()))


class ScriptedDistributions(ProcessedDistributions):
    """A target whose distributions depend on the drafted prefix, and whose random numbers are choices of a chooser."""

    def __init__(
        self, tree: TokenTree, distribution: Callable[[Prefix], np.ndarray], chooser: Chooser, start: Prefix = ()
    ) -> None:
        context = Context(rows=(0,), sequences=(), sampling_params=(), rngs=(), max_depth=np.array([99]))
        super().__init__(context, tree, torch.zeros(0, 1), np.zeros((1, 0), np.int64))
        self._distribution, self._chooser, self._start = distribution, chooser, start

    def probabilities(self, row: int, node: int) -> torch.Tensor:
        path = self._tree.ancestors(row, node)[1:]
        return torch.from_numpy(self._distribution((*self._start, *(int(self._tree.token[row, n]) for n in path))))

    def sample(self, row: int, node: int) -> int:
        return self._chooser.choose(self.probabilities(row, node).tolist())

    def uniform(self, row: int, node: int, stream: Stream, number: int = 0) -> float:
        return Uniform(self._chooser)


def random_distribution(vocab: int, seed: int) -> Callable[[Prefix], np.ndarray]:
    """A different distribution for every prefix, some with tokens of probability 0."""

    @cache
    def distribution(prefix: Prefix) -> np.ndarray:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        p = generator.dirichlet(np.full(vocab, 0.7))
        if generator.random() < 0.3:
            p[generator.integers(vocab)] = 0
        p /= p.sum()
        return p

    return distribution


def tree_of(nodes: Mapping[int, tuple[int, int, int]], q: Sequence[np.ndarray], distinct: bool = False) -> TokenTree:
    """A tree from (parent, token, index in `q` or -1) per node, numbered from 1 below the root."""
    tree = tree_from_lists([[0, *(t for _, t, _ in nodes.values())]], [[-1, *(p for p, _, _ in nodes.values())]])
    return replace(
        tree,
        q_index=np.array([[-1, *(o for _, _, o in nodes.values())]]),
        q=torch.from_numpy(np.stack(q))[None] if q else None,
        distinct=np.array([distinct]),
    )


def sequence_distribution(
    acceptor: Acceptor, grow: Callable[[Chooser], TokenTree], distribution: Callable[[Prefix], np.ndarray], length: int
) -> dict[Prefix, float]:
    """Probability of every sequence of `length` tokens by `acceptor` on trees of `grow`; the target completes it."""

    def run(chooser: Chooser) -> Prefix:
        tree = grow(chooser)
        result = acceptor.accept(tree, 0, ScriptedDistributions(tree, distribution, chooser))
        return (*(int(tree.token[0, n]) for n in result.path), result.token)[:length]

    found: dict[Prefix, float] = defaultdict(float)
    for sequence, chance in outcome_distribution(run).items():
        for whole, part in completed(sequence, chance, distribution, length).items():
            found[whole] += part
    return found


def completed(
    prefix: Prefix, chance: float, distribution: Callable[[Prefix], np.ndarray], length: int
) -> dict[Prefix, float]:
    """Probability of every sequence of `length` tokens that the target continues this prefix to."""
    if len(prefix) == length:
        return {prefix: chance}
    longer = [
        completed((*prefix, t), chance * p, distribution, length) for t, p in enumerate(distribution(prefix).tolist())
    ]
    return {whole: part for found in longer for whole, part in found.items()}


def distance(found: Mapping[Prefix, float], distribution: Callable[[Prefix], np.ndarray]) -> float:
    """Total variation distance between the found sequences and those of the target alone."""
    chances = completed((), 1.0, distribution, len(next(iter(found))))
    return sum(abs(c - found.get(text, 0.0)) for text, c in chances.items()) / 2


class RejectionByTests(Rejection):
    """`Rejection` with what the tests of many nodes compare, and the distribution that they leave."""

    def __init__(self, test: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, NodeDrafts], NodeTests]) -> None:
        self._test = test

    def _accept_child(
        self, tree: TokenTree, row: int, node: int, children: list[int], distributions: ProcessedDistributions
    ) -> tuple[int | None, int]:
        sampled = [c for c in children if tree.q_index[row, c] >= 0]
        if not sampled:
            return super()._accept_child(tree, row, node, children, distributions)
        assert tree.q is not None
        weights = (distributions.probabilities(row, node) * 2.0**50).round().long()
        drafts = NodeDrafts(
            torch.from_numpy(tree.token[row : row + 1, sampled].astype(np.int32)),
            torch.from_numpy(tree.q_index[row : row + 1, sampled].astype(np.int32)),
            torch.tensor([len(sampled)], dtype=torch.int32),
            torch.from_numpy(tree.distinct[row : row + 1]),
            torch.tensor([[torch.inf] * len(sampled) + [0.0]], dtype=torch.float64),  # No test passes.
        )
        tests = self._test(weights[None], torch.zeros(1, dtype=torch.int32), tree.q[row], drafts)
        for trial, child in enumerate(sampled):
            q, p = tests.chance[0, trial].tolist()
            if distributions.uniform(row, node, Stream.ACCEPT, trial) * q < p:
                return child, int(tree.token[row, child])
        token = sample_from(tests.left[0], distributions.uniform(row, node, Stream.RESIDUAL))
        others = (c for c in children if tree.q_index[row, c] < 0 and tree.token[row, c] == token)
        return next(others, None), token
