"""Acceptance rates, token recycling, and several retrievers together."""

import numpy as np
import pytest
import torch

from foretell.core.context import ModelOutput, StepResult
from foretell.core.tree import tree_from_lists
from foretell.draft import CombinedRetriever, Continuation, SuffixRetriever, TokenRecycling
from foretell.draft.acceptance import AcceptanceEstimator
from helpers import context_of


def test_rates_start_from_the_prior_and_follow_observations() -> None:
    estimator = AcceptanceEstimator([0.2, 0.8], weight=4)
    assert estimator.rate(0) == pytest.approx(0.2)
    assert estimator.rate(7) == estimator.rate(1) == pytest.approx(0.8)
    assert estimator.cumulative(1, 3) == pytest.approx((0.8, 0.64, 0.512))
    for _ in range(200):
        estimator.update(0, True)
        estimator.update(1, False)
    assert estimator.rate(0) > 0.98
    assert estimator.rate(1) < 0.02


def test_a_run_counts_up_to_its_first_mistake() -> None:
    estimator, counted = AcceptanceEstimator([0.5], weight=2, decay=1), AcceptanceEstimator([0.5], weight=2, decay=1)
    estimator.update_run(0, [1, 2, 9, 9], [1, 2, 3, 4])
    for right in (True, True, False):
        counted.update(0, right)
    assert estimator.rate(0) == counted.rate(0) == pytest.approx(3 / 5)
    estimator.update_run(0, [1, 2], [1])
    assert estimator.rate(0) == pytest.approx(4 / 6)


def step_of(text: list[int], decided: list[int], logits: torch.Tensor) -> StepResult:
    """A pass over the root only, after which `text` holds what was decided."""
    context = context_of(text)
    root = tree_from_lists([[text[-len(decided) - 1]]], [[-1]])
    return StepResult(context, root, ModelOutput(logits, np.array([[0]])), ((0,),), (tuple(decided),), (0,))


def test_recycling_offers_the_runners_up_of_earlier_passes() -> None:
    recycling = TokenRecycling(6, width=3)
    assert recycling.retrieve(context_of([2]), 8) == [[]]
    recycling.observe(step_of([2, 4], [4], torch.tensor([[0.0, 3.0, 0.0, 1.0, 5.0, 2.0]])))
    recycling.observe(step_of([4, 2], [2], torch.tensor([[0.0, 1.0, 9.0, 0.0, 0.0, 0.0]])))
    found = recycling.retrieve(context_of([2]), 6)[0]
    assert [c.tokens for c in found[:2]] == [(4,), (4, 2)]
    assert {(1,), (5,)} < {c.tokens for c in found}
    assert all(
        len(c.cumulative_acceptance) == len(c.tokens)
        and list(c.cumulative_acceptance) == sorted(c.cumulative_acceptance, reverse=True)
        for c in found
    )
    chances = [c.cumulative_acceptance[-1] for c in found]
    assert chances == sorted(chances, reverse=True)
    assert max(len(c.tokens) for c in recycling.retrieve(context_of([2], max_depth=1), 6)[0]) == 1


def test_recycling_learns_which_ranks_come_true() -> None:
    recycling, logits = TokenRecycling(5, width=2), torch.tensor([[0.0, 9.0, 5.0, 0.0, 0.0]])
    recycling.retrieve(context_of([0]), 4)
    for _ in range(60):
        recycling.observe(step_of([0, 2], [2], logits))
    assert recycling.retrieve(context_of([0]), 1)[0][0].tokens == (2,)
    recycling.release(0)
    assert recycling.retrieve(context_of([0]), 1)[0][0].tokens == (1,)


def test_recycling_keeps_no_more_successors_than_there_are_tokens() -> None:
    recycling = TokenRecycling(3)
    recycling.observe(step_of([0, 1], [1], torch.tensor([[0.0, 2.0, 1.0]])))
    assert recycling.successors()[0].tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="1 to 8 successors"):
        TokenRecycling(100, width=9)


def test_together_offers_everything() -> None:
    recycling = TokenRecycling(9, width=2)
    recycling.observe(step_of([1, 5], [5], torch.arange(9.0)[None]))
    found = CombinedRetriever([SuffixRetriever(), recycling]).retrieve(context_of([1, 2, 1]), 8)[0]
    assert {(2, 1), (8,), (7,)} <= {c.tokens for c in found}
    assert isinstance(found[0], Continuation)
    with pytest.raises(ValueError, match="at least one"):
        CombinedRetriever([])


def test_recycling_forgets_the_salt_that_was_used_least_recently() -> None:
    recycling = TokenRecycling(3)
    for salt in ("first", "second"):
        recycling.successors(salt)[0] = 1
    for i in range(31):
        recycling.successors("first")
        recycling.successors(f"other {i}")
    assert recycling.successors("first")[0, 0] == 1 and recycling.successors("second")[0, 0] == -1
