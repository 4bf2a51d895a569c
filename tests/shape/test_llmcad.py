"""LLMCad's tree: the choice of the branch, the branching, and the adaptive threshold."""

import math

import numpy as np
import pytest

from foretell.accept import Match
from foretell.core.context import Context, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import LLMCadTree
from foretell.shape.llmcad import GrowingBranch, token_share
from helpers import good_model, random_tokens, run, small_model, target, tokens_of

VOCAB = 29


def context(rows: int = 2, max_depth: int = 9) -> Context:
    return Context(
        rows=tuple(range(rows)),
        sequences=tuple(TokenBuffer(random_tokens(5 + i, seed=i)) for i in range(rows)),
        sampling_params=(SamplingParams(),) * rows,
        rngs=(CounterRNG(0),) * rows,
        max_depth=np.full(rows, max_depth),
    )


def test_shares_follow_cumulative_confidence_and_add_up() -> None:
    branches = [
        GrowingBranch(1, 4, 4, math.log(0.5)),
        GrowingBranch(2, 1, 1, math.log(0.3)),
        GrowingBranch(3, 1, 2, math.log(0.2)),
    ]
    shares = [token_share(b, branches) for b in branches]
    assert shares == pytest.approx([3.0, 1.8, 1.2])
    deficits = [s - b.size for s, b in zip(shares, branches, strict=True)]
    assert deficits.index(max(deficits)) == 1


def test_without_branching_it_is_a_chain() -> None:
    tree = LLMCadTree(budget=6, branch_threshold=1.0, threshold=1e-9).grow(good_model(VOCAB), context())
    assert tree.valid.sum(1).tolist() == [7, 7]
    for row in range(2):
        nodes = np.flatnonzero(tree.valid[row])
        assert tree.parent[row, nodes].tolist() == [-1, *nodes[:-1]]


def test_every_likely_token_opens_a_branch_and_the_budget_holds() -> None:
    tree = LLMCadTree(budget=12, branch_threshold=0.02, threshold=1e-9).grow(good_model(VOCAB), context(6))
    families = [tree.token[row, below].tolist() for row in range(6) for below in tree.children(row).values()]
    assert max(map(len, families)) > 1
    assert all(len(set(tokens)) == len(tokens) for tokens in families)
    assert tree.valid.sum(1).max() == 13


def test_no_node_is_deeper_than_the_maximum() -> None:
    tree = LLMCadTree(budget=30, branch_threshold=0.05, threshold=1e-9).grow(good_model(VOCAB), context(2, max_depth=2))
    assert tree.depth[tree.valid].max() == 2
    assert LLMCadTree().grow(good_model(VOCAB), context(1, max_depth=0)).nodes == 1


def test_a_high_threshold_stops_after_one_token() -> None:
    assert LLMCadTree(threshold=1.0, branch_threshold=1.0).grow(good_model(VOCAB), context(1)).valid.sum() == 2


def test_the_threshold_halves_after_a_step_without_rejection() -> None:
    shape = LLMCadTree(8, branch_threshold=1.0, threshold=1e-3)
    engine = Engine(DecoderRunner(target()), Method(DraftModel(DecoderRunner(target())), shape, Match()))
    engine.submit(Request(random_tokens(7), max_new_tokens=40))
    (live,) = engine._scheduler
    levels = [math.exp(shape._log_threshold_for(live.sequence))]
    for _ in range(3):
        engine.step()
        levels.append(math.exp(shape._log_threshold_for(live.sequence)))
    assert levels == pytest.approx([1e-3 * 0.5**i for i in range(4)])


def test_the_rise_is_the_share_of_rejected_tokens() -> None:
    shape = LLMCadTree(4, branch_threshold=1.0, threshold=0.01)
    engine = Engine(DecoderRunner(target()), Method(small_model(VOCAB), shape, Match()))
    number = engine.submit(Request(random_tokens(7), max_new_tokens=40))
    (live,) = engine._scheduler
    before, seen = math.log(0.01), 0
    while engine.busy:
        shape_before = shape._log_threshold_for(live.sequence)
        updates = engine.step()
        if updates and updates[0].finish_reason is None:
            accepted = updates[0].accepted
            after = shape._log_threshold_for(live.sequence)
            drafted = engine.statistics[number].drafted - seen
            if drafted:
                change = math.log(0.5) if accepted == drafted else (drafted - accepted) / drafted * math.log(2)
                assert after == pytest.approx(min(0.0, shape_before + change))
        seen = engine.statistics[number].drafted if engine.busy else seen
    engine.submit(Request(random_tokens(7), max_new_tokens=40))
    (live,) = engine._scheduler
    assert shape._log_threshold_for(live.sequence) == pytest.approx(before), "a finished request leaves nothing"


@pytest.mark.exhaustive_types
def test_tokens_are_the_targets_whatever_the_parameters() -> None:
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=15) for n in (3, 20, 8)]
    plain = None
    for budget, branch_threshold, threshold in ((1, 0.3, 0.01), (5, 0.0, 0.5), (20, 0.1, 1e-6)):
        engine = Engine(
            DecoderRunner(target()),
            Method(small_model(VOCAB), LLMCadTree(budget, branch_threshold, threshold), Match()),
            rows=2,
        )
        found = [tokens_of(u) for u in run(engine, requests)]
        plain = found if plain is None else plain
        assert found == plain


@pytest.mark.parametrize("values", [(0, 0.3, 0.01, 0.5), (4, 1.5, 0.01, 0.5), (4, 0.3, 0.0, 0.5), (4, 0.3, 0.01, 1.0)])
def test_impossible_parameters_are_refused(values: tuple[int, float, float, float]) -> None:
    with pytest.raises(ValueError, match="an LLMCad tree needs"):
        LLMCadTree(*values)
