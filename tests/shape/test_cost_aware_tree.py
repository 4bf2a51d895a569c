"""Dynamic trees sized by the learned time of a pass: growth where nodes are free, and no oscillation under noise."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from foretell.core.context import Context, ModelOutput, StepResult
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor, TopTokens
from foretell.shape import CostAwareTree, PassCost
from helpers import context_of

_WIDTH, _BUDGET = 6, 64


class Geometric(Predictor):
    """Gives the child of rank r the probability 0.5 * 0.4^r, whatever the node."""

    def top_tokens(self, tree, frontier, context, count, noise=None):  # type: ignore[no-untyped-def]
        """The same tokens after every node."""
        index = np.full(tree.token.shape, -1, np.int64)
        row = np.arange(tree.rows)[:, None]
        index[row, frontier] = np.arange(frontier.size).reshape(frontier.shape)
        probability = np.tile(0.5 * 0.4 ** np.arange(count), (frontier.size, 1))
        return TopTokens(probability, np.tile(np.arange(count), (frontier.size, 1)), index)

    def expand(self, tree, frontier, context):  # type: ignore[no-untyped-def]
        """Not called."""
        raise NotImplementedError


def sizes(seconds: Callable[[int], float], steps: int = 400, rows: int = 1) -> list[int]:
    """Nodes per pass of a shape on a machine with these seconds per pass; 2 tokens per step and request."""
    shape, context = CostAwareTree(8, _WIDTH, _BUDGET), _context(rows)
    found = []
    for _ in range(steps):
        tree = shape.grow(Geometric(), context)
        size = int(tree.valid.sum())
        found.append(size)
        shape.observe(_step(context, tree, seconds(size)))
        context.kept.clear()
    return found


def _context(rows: int) -> Context:
    context = context_of(*([1, 2, 3] for _ in range(rows)))
    for sequence in context.sequences:
        sequence.append([4])
    return context


def _step(context: Context, tree: TokenTree, seconds: float) -> StepResult:
    levels = 1 + int(tree.depth.max())
    output = ModelOutput(torch.zeros(0, 1), np.zeros((0, 0), np.int64))
    rows = len(context.rows)
    return StepResult(
        *(context, tree, output, ((0, 1),) * rows, ((5, 6),) * rows, (3,) * rows),
        draft_seconds=1e-5 * levels,
        pass_seconds=seconds,
    )


def flat(free: int, slope: float = 0.1) -> Callable[[int], float]:
    """Passes that cost the same up to `free` tokens, and then `slope` more per token."""
    return lambda n: 0.004 * (1 + slope * max(0, n - free))


@pytest.mark.parametrize("free", [8, 32])
@pytest.mark.exhaustive_types
def test_trees_grow_to_the_nodes_that_are_free(free: int) -> None:
    late = sizes(flat(free))[-200:]
    assert 0.75 * free <= np.median(late) <= free + 2


def test_trees_shrink_where_nodes_cost() -> None:
    assert np.median(sizes(lambda n: 0.004 * (0.7 + 0.3 * n))[-200:]) <= 4


def test_trees_of_a_batch_share_the_free_nodes() -> None:
    late = sizes(flat(32), rows=4)[-200:]
    assert 24 <= np.median(late) <= 34


@pytest.mark.exhaustive_types
def test_noise_does_not_make_sizes_oscillate() -> None:
    noise = random.Random(0)

    def noisy(n: int) -> float:
        # Other work on the machine: one pass in eight takes three times as long, the others vary by a tenth.
        return flat(16)(n) * (3 if noise.random() < 0.125 else 1) * noise.uniform(0.95, 1.05)

    late = sizes(noisy)[-200:]
    assert 12 <= np.median(late) <= 18
    assert np.mean([abs(n - np.median(late)) <= 4 for n in late]) > 0.9


def test_a_machine_that_becomes_slower_changes_no_size() -> None:
    cost = PassCost()
    for i in range(200):
        cost.update((1, 8)[i % 2], (0.01, 0.012)[i % 2])
    for _ in range(40):
        cost.update(8, 0.036)
    one, eight = cost.seconds_of([1, 8])
    assert eight / one == pytest.approx(1.2, rel=0.06)
    assert eight == pytest.approx(0.036, rel=0.1)
