"""Requests of different cache salts share neither prefixes nor what drafters learn, and their answers are the same."""

from collections.abc import Sequence

import pytest

from foretell.accept import Match
from foretell.draft import NoDrafter, TokenRecycling
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Completion, Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import RootOnly, Trie
from helpers import VOCAB, naive, random_tokens, target

PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())
PROMPT = random_tokens(40, seed=5)


def engine(rows: int, method: AnyMethod = PLAIN) -> Engine:
    return Engine(DecoderRunner(target()), method, rows=rows, prefix_caching=True)


def asked(*salts: str) -> list[Request]:
    return [Request(PROMPT, max_new_tokens=6, cache_salt=salt, return_drafts=True) for salt in salts]


def cached(found: Sequence[Completion]) -> list[int]:
    return [c.statistics.cached_tokens for c in found]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_prefix_is_found_under_its_own_salt_only(rows: int) -> None:
    one = engine(rows)
    (first,) = one.complete(asked("a"))
    others = one.complete(asked("b")) + one.complete(asked(""))
    again = one.complete(asked("a"))
    assert cached([first, *others]) == [0, 0, 0]
    assert cached(again) == [0 if rows == 1 else len(PROMPT) - 1], "a row holds the tokens of one request"
    assert {c.tokens for c in (first, *others, *again)} == {tuple(naive(target(), asked("a")[0]))}


def test_prompts_of_one_batch_wait_for_those_of_their_salt_only() -> None:
    found = engine(4).complete(asked("a", "b", "a", ""))
    assert cached(found) == [0, 0, len(PROMPT) - 1, 0]
    assert len({c.tokens for c in found}) == 1


def test_recycling_learns_from_each_salt_apart() -> None:
    def drafts(one: Engine, *salts: str) -> list[object]:
        return [[p.drafted for p in c.passes] for c in one.complete(asked(*salts))]

    one = engine(4, Method(TokenRecycling(VOCAB), Trie(6), Match()))
    (alone,) = drafts(one, "a")
    (second,) = drafts(one, "a")
    assert second != alone, "the second request of a salt profits from the first"
    assert drafts(one, "b", "c", "") == [alone] * 3
    assert drafts(one, "b", "c", "") == [second] * 3
