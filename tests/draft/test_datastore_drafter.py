"""REST: the trie of frequent continuations equals brute force, and no datastore changes an answer."""

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.accept import Match, Rejection
from foretell.core.context import Context, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.draft import Continuation, DatastoreRetriever
from foretell.draft.datastore import most_frequent_prefixes
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.retrieval.datastore import Datastore
from foretell.shape import Trie
from helpers import engine_for, generate, naive, random_tokens, target

REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=t, seed=n), 14) for n, t in ((3, 0.0), (17, 1.0))
]
TEXTS = cache(lambda: [naive(target(), r) for r in REQUESTS])


def context_of(tokens: Sequence[int], max_depth: int = 100) -> Context:
    return Context((0,), (TokenBuffer(tokens),), (SamplingParams(),), (CounterRNG(0),), np.array([max_depth]))


def found(
    rest: DatastoreRetriever, tokens: Sequence[int], budget: int = 64, max_depth: int = 100
) -> list[Continuation]:
    return rest.retrieve(context_of(tokens, max_depth), budget)[0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12), st.integers(0, 20))
def test_the_most_frequent_prefixes_equal_brute_force(rows: list[list[int]], most: int) -> None:
    matrix = np.array([[*r, *[-1] * (4 - len(r))] for r in rows], np.int64).reshape(len(rows), 4)
    every = Counter(tuple(r[: i + 1]) for r in rows for i in range(len(r)))
    kept = most_frequent_prefixes(matrix, most)
    assert all(every[p] == n for p, n in kept.items())
    assert sorted(kept.values()) == sorted(sorted(every.values(), reverse=True)[:most])
    assert all(p[:i] in kept for p in kept for i in range(1, len(p)))


def test_chances_are_shares_of_the_occurrences() -> None:
    rest = DatastoreRetriever(Datastore.from_documents([[7, 8, 1, 2], [7, 8, 1, 3], [7, 8, 4], [7, 8]]), shortest=1)
    paths = {c.tokens: c.cumulative_acceptance for c in found(rest, [9, 7, 8])}
    assert set(paths) == {(1, 2), (1, 3), (4,)}
    rate = paths[4,][0] * 4
    assert paths[1, 2] == pytest.approx((2 / 4 * rate, 1 / 4 * rate**2))
    assert 0 < rate < 1


def test_budget_room_and_copy_bound_the_trie() -> None:
    store = Datastore.from_documents([[1, *(t + 10 for t in random_tokens(12, seed=s))] for s in range(50)])
    tree = Trie(20).grow(DatastoreRetriever(store, shortest=1, copy=3), context_of([5, 1]))
    assert tree.nodes == 21 and tree.depth.max() <= 3
    assert max(len(c.tokens) for c in found(DatastoreRetriever(store, shortest=1), [1], max_depth=2)) == 2
    assert found(DatastoreRetriever(store, shortest=1), [1], max_depth=0) == []


def test_a_match_may_have_to_occur_often() -> None:
    store = Datastore.from_documents([[1, 2, 3, 9], [5, 2, 3, 8], [6, 2, 3, 8]])
    assert found(DatastoreRetriever(store), [1, 2, 3])[0].tokens == (9,)
    assert {c.tokens for c in found(DatastoreRetriever(store, least_hits=2), [1, 2, 3])} == {(8,), (9,)}
    assert found(DatastoreRetriever(store, least_hits=4), [1, 2, 3]) == []


def test_the_pending_token_belongs_to_the_pattern() -> None:
    store = Datastore.from_documents([[1, 2, 3, 4]])
    assert found(DatastoreRetriever(store), [2, 3])[0].tokens == (4,)
    assert found(DatastoreRetriever(store), [3, 2]) == []


def test_coverage_is_learned() -> None:
    request = Request(random_tokens(17, seed=5), max_new_tokens=60)
    right = [*request.prompt, *naive(target(), request)]
    chances = []
    for document in (right, [t for token in right for t in (token, 0)]):
        rest = DatastoreRetriever(Datastore.from_documents([document]), shortest=1)
        engine = engine_for(Method(rest, Trie(8), Match()), rows=1, chunk=64)
        engine.submit(request)
        first = engine.step()
        for _ in range(3):
            engine.step()
        text = [*request.prompt, *(t for u in first for t in u.tokens)]
        before = found(DatastoreRetriever(rest.store, shortest=1), text)[0].cumulative_acceptance[0]
        chances.append(found(rest, text)[0].cumulative_acceptance[0] / before)
    assert chances[0] > 1 > chances[1]


@pytest.mark.parametrize("accept", [Match(), Rejection()], ids=["match", "rejection"])
def test_a_datastore_never_changes_an_answer(accept: Match | Rejection) -> None:
    texts = TEXTS()
    noise = [random_tokens(200, seed=s) for s in range(3)]
    whole = [[*r.prompt, *t] for r, t in zip(REQUESTS, texts, strict=True)]
    stores: list[list[list[int]]] = [[], [[]], noise, whole]
    for documents in stores:
        method = Method(DatastoreRetriever(Datastore.from_documents(documents), shortest=1), Trie(12), accept)
        assert generate(method, REQUESTS) == texts


def test_a_datastore_with_the_answer_is_accepted_at_full_length() -> None:
    request = Request(random_tokens(17, seed=5), max_new_tokens=44)
    text = naive(target(), request)
    store = Datastore.from_documents([random_tokens(100, seed=1), [*request.prompt, *text]])
    engine = engine_for(Method(DatastoreRetriever(store), Trie(10), Match()), chunk=64)
    (done,) = engine.complete([request])
    assert list(done.tokens) == text
    assert done.statistics.target_passes == 4


def test_an_end_of_sequence_in_a_continuation_ends_the_answer() -> None:
    request = Request(random_tokens(17, seed=5), max_new_tokens=20)
    text = naive(target(), request)
    request = Request(request.prompt, max_new_tokens=20, eos=(text[6],))
    rest = DatastoreRetriever(Datastore.from_documents([[*request.prompt, *text]]))
    assert generate(Method(rest, Trie(10), Match()), [request]) == [naive(target(), request)]


def test_impossible_sizes_are_refused() -> None:
    store = Datastore.from_documents([[1, 2]], depth=8)
    with pytest.raises(ValueError, match="depth"):
        DatastoreRetriever(store, longest=9)
    with pytest.raises(ValueError, match="1 <= shortest"):
        DatastoreRetriever(store, longest=1, shortest=2)
    with pytest.raises(ValueError, match="at least 1"):
        DatastoreRetriever(store, longest=8, hits=0)
