"""Adaptive chains: published check values, and unchanged answers."""

from copy import deepcopy

import pytest

from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel, NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.linear import Linear
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import AdaptiveChain, Chain, ConfidenceRule, HeuristicSchedule, RootOnly
from foretell.shape.adaptive import ChainHistory
from foretell.shape.chain import ChainLimits
from helpers import VOCAB, engine_for, generate, random_tokens, small_model, target

REQUESTS = [Request(random_tokens(n, seed=n), max_new_tokens=18) for n in (3, 17, 9)]
RULES = [HeuristicSchedule(), ConfidenceRule()]


def test_the_heuristic_schedule() -> None:
    history, lengths = ChainHistory(ChainLimits(5)), []
    for accepted in (5, 6, 7, 0, 2, 6):
        history = HeuristicSchedule().update(history, history.limits.length, accepted)
        lengths.append(history.limits.length)
    assert lengths == [7, 6, 5, 4, 3, 2]
    shortest = HeuristicSchedule().update(ChainHistory(ChainLimits(1)), 1, 0)
    assert shortest.limits.length == 1
    assert HeuristicSchedule(max_length=6).update(ChainHistory(ChainLimits(5)), 5, 5).limits.length == 6


def test_draft_and_verify_check_values() -> None:
    history, found = ChainHistory(ChainLimits(8, confidence=0.8)), []
    for accepted, drafted in ((0, 4), (2, 4), (8, 8)):
        history = ConfidenceRule().update(history, drafted, accepted)
        found.append((history.acceptance, history.limits.confidence))
    assert [a for a, _ in found] == [0, 0.25, 0.625]
    assert [c for _, c in found] == pytest.approx([0.801, 0.802, 0.803])


def test_the_threshold_falls_only_below_the_full_length() -> None:
    sure = ChainHistory(ChainLimits(8, confidence=0.8), acceptance=1.0)
    assert ConfidenceRule().update(sure, 4, 4).limits.confidence == pytest.approx(0.799)
    assert ConfidenceRule().update(sure, 8, 8).limits.confidence == 0.8


@pytest.mark.exhaustive_types
@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_adapting_changes_no_answer(rule: HeuristicSchedule | ConfidenceRule) -> None:
    plain = generate(Method(NoDrafter(), RootOnly(), Match()), REQUESTS)
    for rows, chunk in ((3, 16), (1, 512)):
        method = Method(small_model(VOCAB), AdaptiveChain(Chain(4, confidence=0.5), rule), Rejection())
        assert generate(method, REQUESTS, rows, chunk) == plain


@pytest.mark.exhaustive_types
@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_sampled_answers_do_not_depend_on_the_batch(rule: HeuristicSchedule | ConfidenceRule) -> None:
    requests = [Request(r.prompt, SamplingParams(temperature=1, seed=3), 18) for r in REQUESTS]

    def answers(rows: int) -> list[list[int]]:
        method = Method(small_model(VOCAB), AdaptiveChain(Chain(4, confidence=0.5), rule), Rejection())
        return generate(method, requests, rows)

    assert answers(3) == answers(1)


@pytest.mark.exhaustive_types
def test_good_drafts_lengthen_the_chain_and_bad_ones_shorten_it_for_each_request_by_itself() -> None:
    def lengths(draft: DraftModel) -> list[int]:
        """Length of the chain after every step of a request."""
        shape, found = AdaptiveChain(Chain(4), HeuristicSchedule()), list[int]()
        engine = engine_for(Method(draft, shape, Match()), rows=1)
        engine.submit(Request([1, 2, 3], max_new_tokens=40))
        (live,) = engine._scheduler
        while engine.busy:
            engine.step()
            found.append(shape.history(live.sequence).limits.length)
        engine.submit(Request([1, 2, 3], max_new_tokens=40))
        (live,) = engine._scheduler
        assert shape.history(live.sequence).limits.length == 4, "the next request starts afresh"
        return found

    assert lengths(DraftModel(DecoderRunner(target())))[:4] == [6, 8, 10, 12], "every draft is accepted"
    wrong = deepcopy(target())
    wrong.head = Linear(-wrong.head.weight)
    found = lengths(DraftModel(DecoderRunner(wrong)))
    assert found[:4] == [3, 2, 1, 1], "the target's least probable tokens are drafted"


def test_a_row_falls_back_before_an_unsure_token() -> None:
    never = Engine(DecoderRunner(target()), Method(small_model(VOCAB), Chain(5, fallback=1.0), Match()))
    assert never.complete(REQUESTS[:1])[0].statistics.drafted == 0
    one = Engine(DecoderRunner(target()), Method(small_model(VOCAB), Chain(5, confidence=1.0), Match()))
    (done,) = one.complete(REQUESTS[:1])
    assert 0 < done.statistics.drafted <= done.statistics.target_passes


def test_bad_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="lies in"):
        Chain(4, fallback=1.5)
