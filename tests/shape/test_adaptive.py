"""Chains whose length follows the acceptance of the request: unchanged answers."""

from copy import deepcopy

import pytest

from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel, NoDrafter
from foretell.engine.draft_account import DraftAccount
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.linear import Linear
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, RootOnly
from helpers import VOCAB, engine_for, generate, random_tokens, small_model, target

REQUESTS = [Request(random_tokens(n, seed=n), max_new_tokens=18) for n in (3, 17, 9)]


def adaptive(draft: DraftModel | None = None) -> AnyMethod:
    return Method(small_model(VOCAB) if draft is None else draft, Chain(6, adaptive=True), Rejection())


def test_the_length_with_the_most_tokens_per_time_is_chosen() -> None:
    account, lengths = DraftAccount(), [DraftAccount().own_depth(8)]
    for drafted, accepted in ((8, 8), (8, 8), (8, 0), (8, 0), (8, 0), (8, 0), (8, 0), (8, 0)):
        account.count_chain(drafted, accepted)
        lengths.append(account.own_depth(8))
    # At a chance of 0.7, (1 + 0.7 + … + 0.7^n) / (1 + 0.1 n) is largest at n = 4 (2.7731 / 1.4).
    assert lengths[0] == 4 and lengths[2] == 8 and lengths[-1] < 5
    assert lengths[2:] == sorted(lengths[2:], reverse=True)
    assert DraftAccount().own_depth(2) == 2 and DraftAccount().own_depth(0) == 0


def test_adapting_changes_no_greedy_answer() -> None:
    plain = generate(Method(NoDrafter(), RootOnly(), Match()), REQUESTS)
    for rows, chunk in ((3, 16), (1, 512)):
        assert generate(adaptive(), REQUESTS, rows, chunk) == plain


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    requests = [Request(r.prompt, SamplingParams(temperature=1, seed=3), 18) for r in REQUESTS]
    assert generate(adaptive(), requests, 3) == generate(adaptive(), requests, 1)


@pytest.mark.exhaustive_types
def test_good_drafts_lengthen_the_chain_and_bad_ones_shorten_it_for_each_request_by_itself() -> None:
    def lengths(draft: DraftModel) -> list[int]:
        """Drafts of every step of a request; the next request starts afresh."""
        engine, found = engine_for(adaptive(draft), rows=1), list[list[int]]()
        for _ in range(2):
            engine.submit(Request([1, 2, 3], max_new_tokens=40))
            found.append([])
            while engine.busy:
                engine.step()
                found[-1].append(engine.last_step.counts.drafted)
        assert found[0] == found[1]
        return found[0]

    good = lengths(DraftModel(DecoderRunner(target())))
    assert good[0] == 4 and good[3] == 6, "every draft is accepted"
    wrong = deepcopy(target())
    wrong.head = Linear(-wrong.head.weight)
    assert lengths(DraftModel(DecoderRunner(wrong)))[:12][-1] == 1, "the target's least probable tokens are drafted"


def test_a_row_falls_back_before_an_unsure_token() -> None:
    never = Engine(DecoderRunner(target()), Method(small_model(VOCAB), Chain(5, fallback=1.0), Match()))
    assert never.complete(REQUESTS[:1])[0].statistics.drafted == 0
    one = Engine(DecoderRunner(target()), Method(small_model(VOCAB), Chain(5, confidence=1.0), Match()))
    (done,) = one.complete(REQUESTS[:1])
    assert 0 < done.statistics.drafted <= done.statistics.target_passes


def test_bad_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="lies in"):
        Chain(4, fallback=1.5)
