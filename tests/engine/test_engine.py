"""The engine: chunked prefill, limits, cancellation, statistics and errors."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from foretell.accept import Match, Rejection
from foretell.core.context import Context
from foretell.core.sampling import SamplingParams
from foretell.draft import Continuation, Drafter, DrafterUnion, DraftModel, NoDrafter, Retriever
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request, Update
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, DynamicTree, RootOnly, Shape, Trie
from foretell.testing import TINY, tiny_decoder
from foretell.tokenizer.stream import Detokenizer
from helpers import (
    STATES,
    VARIANTS,
    VOCAB,
    Variant,
    engine_for,
    generate,
    letters,
    methods_by_kind,
    naive,
    random_tokens,
    run,
    small_model,
    statistics_of,
    target,
    tokens_of,
    unchecked,
)

PROMPT = random_tokens(12, seed=12)
PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())


@dataclass
class ScriptedRetriever(Retriever):
    """Retrieves the true continuation, or tokens that are never right."""

    truth: list[int]
    right: bool = True

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        out = []
        for text in context.sequences:
            rest = self.truth[len(text.generated) :][:budget]
            tokens = tuple(t if self.right else (t + 1) % VOCAB for t in rest)
            out.append([Continuation(tokens, (0.5,) * len(tokens))] if tokens else [])
        return out


def scripted_engine(right: bool) -> tuple[Engine, Request, list[int]]:
    request = Request(PROMPT, max_new_tokens=24)
    truth = naive(target(), request)
    return engine_for(Method(ScriptedRetriever(truth, right), Trie(5), Match())), request, truth


def test_an_oracle_reaches_the_most_tokens_per_pass() -> None:
    engine, request, truth = scripted_engine(right=True)
    (done,) = engine.complete([request])
    assert list(done.tokens) == truth
    statistics = done.statistics
    assert statistics.target_passes == 4
    assert statistics.tokens_per_pass == 6
    assert statistics.accepted_per_position == [4] * 5
    assert statistics.drafted == 20
    assert (statistics.prompt_tokens, statistics.new_tokens) == (12, 24)


def test_wrong_drafts_cost_speed_and_nothing_else() -> None:
    engine, request, truth = scripted_engine(right=False)
    (done,) = engine.complete([request])
    assert list(done.tokens) == truth
    assert done.statistics.target_passes == 24
    assert done.statistics.accepted_per_position == []


@pytest.mark.parametrize("chunk", [1, 3, 11, 12, 500])
def test_prompts_are_read_in_chunks(chunk: int) -> None:
    engine = engine_for(PLAIN, rows=2, chunk=chunk)
    requests = [Request(random_tokens(12, seed=s), max_new_tokens=3) for s in (1, 2)]
    for request in requests:
        engine.submit(request)
    read = 0
    while engine.runner.length(1) < 12:
        engine.step()
        now = engine.runner.length(0) + engine.runner.length(1)
        assert now - read <= chunk + 1
        read = now
    texts = generate(PLAIN, requests, rows=2, chunk=chunk)
    assert texts == [naive(target(), r) for r in requests]


def test_a_draft_model_reads_its_backlog_in_chunks() -> None:
    network = target().first_layers(1)
    method = Method(DraftModel(DecoderRunner(network), chunk=5), Chain(3), Rejection())
    request = Request(random_tokens(43), max_new_tokens=9)
    assert generate(method, [request]) == [naive(target(), request)]


def test_a_sequence_longer_than_the_context_of_the_draft_model_is_decoded_without_drafts() -> None:
    short = tiny_decoder(replace(TINY, vocab=VOCAB, layers=1, context=20))
    engine = engine_for(Method(DraftModel(DecoderRunner(short)), Chain(4), Rejection()), rows=2)
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=16) for n in (30, 8)]
    long, short_one = engine.complete(requests)
    assert [list(long.tokens), list(short_one.tokens)] == [naive(target(), r) for r in requests]
    assert long.statistics.drafted == 0
    assert short_one.statistics.drafted > 0


def test_a_cancelled_request_ends_at_once_and_the_others_go_on() -> None:
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=12) for n in (5, 9, 4)]
    engine = engine_for(Method(small_model(VOCAB), Chain(2), Rejection()), rows=2)
    first, second, waiting = (engine.submit(r) for r in requests)
    texts: dict[int, list[int]] = {first: [], second: [], waiting: []}
    for _ in range(2):
        for update in engine.step():
            texts[update.request] += update.tokens
    for number in (first, waiting):
        last = engine.cancel(number)
        assert last is not None
        assert (last.request, last.tokens, last.finish_reason) == (number, (), "cancelled")
        assert engine.cancel(number) is None
    for update in engine.run():
        texts[update.request] += update.tokens
    expected = [naive(target(), r) for r in requests]
    assert texts[first] == expected[0][: len(texts[first])]
    assert texts[second] == expected[1]
    assert texts[waiting] == []
    assert engine.cancel(second) is None
    assert not engine.busy


def test_a_cancelled_request_returns_the_text_held_back() -> None:
    request = Request(PROMPT, max_new_tokens=9)
    text = letters(naive(target(), request))
    engine = engine_for(PLAIN)
    engine.submit(replace(request, stop=(text[:2] + "!",)))
    shown = "".join(u.text for _ in range(2) for u in engine.step())
    last = engine.cancel(1)
    assert last is not None
    assert shown == ""
    assert last.text == text[:2]


@pytest.mark.parametrize("method", ["plain", "oracle"])
def test_a_stop_string_across_steps_cuts_text_and_tokens_alike(method: str) -> None:
    request = Request(PROMPT, max_new_tokens=24)
    truth = naive(target(), request)
    text, stop = letters(truth), letters(truth[3:8])
    made = PLAIN if method == "plain" else Method(ScriptedRetriever(truth), Trie(3), Match())
    engine = engine_for(made)
    updates = run(engine, [replace(request, stop=(stop,), logprobs=True)])[0]
    end = text.index(stop)
    assert "".join(u.text for u in updates) == text[:end]
    assert tokens_of(updates) == truth[: end + len(stop)]
    assert updates[-1].finish_reason == "stop"
    assert sum(len(u.logprobs) for u in updates) == statistics_of(updates).new_tokens == end + len(stop)


def test_an_end_of_sequence_among_the_drafts_ends_the_text() -> None:
    request = Request(PROMPT, max_new_tokens=24)
    truth = naive(target(), request)
    engine = engine_for(Method(ScriptedRetriever(truth), Trie(9), Match()))
    updates = run(engine, [replace(request, eos=(truth[2],))])[0]
    assert tokens_of(updates) == truth[: truth.index(truth[2]) + 1]
    assert updates[-1].finish_reason == "stop"


def test_the_context_limits_the_answer() -> None:
    updates = run(engine_for(PLAIN, chunk=400), [Request(random_tokens(250), max_new_tokens=99)])[0]
    assert len(tokens_of(updates)) == 6
    assert updates[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "the prompt is empty"),
        (Request([1] * 256), "the prompt has 256 tokens; the model reads at most 255"),
        (Request([1], max_new_tokens=0), "max_new_tokens must be at least 1, found 0"),
        (Request([1], max_new_tokens=-3), "max_new_tokens must be at least 1, found -3"),
        (Request([1, VOCAB]), f"outside the model's vocabulary of {VOCAB}"),
        (Request([-1]), "outside the model's vocabulary"),
        (Request([1], SamplingParams(logit_bias={VOCAB: 1.0})), "logit_bias names a token outside"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(request_: Request, words: str) -> None:
    engine = engine_for(PLAIN)
    with pytest.raises(ValueError, match=words) as error:
        engine.submit(request_)
    assert "\n" not in str(error.value)
    assert not engine.busy


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number, found 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number, found True"),
        ({"prompt": "abc"}, "the prompt must be a sequence of token ids"),
        ({"prompt": [1, 2.0]}, "the prompt must be a sequence of token ids"),
        ({"sampling_params": {"temperature": 1}}, "sampling_params must be a SamplingParams, found dict"),
        ({"stop": "abc"}, "stop must be a sequence of strings"),
        ({"stop": ("a", "")}, "that are not empty"),
        ({"eos": ("x",)}, "eos must be a sequence of token ids"),
    ],
)
def test_requests_of_wrong_types_are_refused_and_the_others_go_on(values: dict[str, Any], words: str) -> None:
    engine, good = engine_for(PLAIN), Request(PROMPT, max_new_tokens=5)
    with unchecked():
        bad = replace(good, **values)
        engine.submit(good)
        with pytest.raises(ValueError, match=words):
            engine.submit(bad)
    assert [t for u in engine.run() for t in u.tokens] == naive(target(), good)
    with unchecked(), pytest.raises(ValueError, match=words):
        engine.complete([good, bad])
    assert not engine.busy, "a list with a bad request is refused as a whole"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number, found 'hot'"),
        ({"top_k": 1.5}, "top_k must be a whole number, found 1.5"),
        ({"seed": 0.5}, "seed must be a whole number, found 0.5"),
        ({"logit_bias": {1: "x"}}, "logit_bias must give a number for every token id"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias must give a number for every token id"),
        ({"logit_bias": [1]}, "logit_bias must give a number for every token id"),
    ],
)
def test_sampling_parameters_of_wrong_types_are_refused(values: dict[str, Any], words: str) -> None:
    with unchecked(), pytest.raises(ValueError, match=words):
        SamplingParams(**values)


def test_a_request_cancelled_between_updates_gets_none_after_its_last() -> None:
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=8) for n in (5, 9, 4)]
    engine = engine_for(PLAIN)
    numbers = [engine.submit(r) for r in requests]
    updates: dict[int, list[Update]] = {n: [] for n in numbers}
    for update in engine.run():
        updates[update.request].append(update)
        if update.request == numbers[0] and len(updates[numbers[0]]) == 3:
            # Its third tokens have been decided, and not been given yet.
            last = engine.cancel(numbers[1])
            assert last is not None
            updates[numbers[1]].append(last)
    assert [
        [u.finish_reason for u in updates[n]].index(r) + 1
        for n, r in zip(numbers, ("length", "cancelled", "length"), strict=True)
    ] == [len(updates[n]) for n in numbers]
    whole = [naive(target(), r) for r in requests]
    assert [tokens_of(updates[n]) for n in numbers] == [whole[0], whole[1][:3], whole[2]]
    assert [statistics_of(updates[n]).new_tokens for n in numbers] == [8, 3, 8]


def test_statistics_are_held_while_a_request_runs() -> None:
    engine = engine_for(PLAIN)
    first = engine.submit(Request(PROMPT, max_new_tokens=3))
    engine.step()
    assert engine.statistics[first].new_tokens == 1
    list(engine.run())
    assert not engine.statistics
    assert engine.step() == []


@pytest.mark.parametrize(
    ("method", "other"),
    [
        (Method(small_model(VOCAB), Chain(3), Rejection()), DynamicTree(2, 2, 4)),
        (
            Method(DrafterUnion([small_model(VOCAB), small_model(VOCAB)]), BranchingTree((2, 1)), Rejection()),
            BranchingTree((2, 2)),
        ),
    ],
)
def test_a_method_serves_one_engine_at_a_time(method: AnyMethod, other: Shape[Drafter]) -> None:
    request = Request(PROMPT, SamplingParams(1.0), 9)
    one = engine_for(method)
    one.submit(request)
    one.step()
    for shape in (method.tree, other):
        with pytest.raises(ValueError, match="serves another engine or another method, which is busy: build parts"):
            engine_for(replace(method, tree=shape))
    rest = [t for u in one.run() for t in u.tokens]
    two = engine_for(method)
    (whole,) = two.complete([request])
    assert list(whole.tokens[-len(rest) :]) == rest
    two.submit(request)
    with pytest.raises(ValueError, match="serves another engine"):
        one.submit(request)


@pytest.mark.parametrize("variant", methods_by_kind(VARIANTS, of=STATES))
def test_a_method_bound_to_another_engine_has_released_all_rows(variant: Variant) -> None:
    """Even those of an engine that was deleted with requests running."""
    requests = [Request(random_tokens(n, seed=n), SamplingParams(1.0, seed=n), 9) for n in (13, 4)]
    expected = generate(variant.make(VOCAB), requests)
    method = variant.make(VOCAB)
    deleted = engine_for(method)
    for number in range(3):
        deleted.submit(Request(random_tokens(9, seed=number), max_new_tokens=20))
    for _ in range(4):
        deleted.step()
    del deleted
    gc.collect()
    assert generate(method, requests) == expected


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Engine(DecoderRunner(target()), PLAIN).submit(Request([1], stop=("x",)))


@pytest.mark.parametrize(("rows", "chunk"), [(0, 1), (1, 0)])
def test_an_engine_needs_rows_and_chunks(rows: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Engine(DecoderRunner(target()), PLAIN, rows=rows, chunk=chunk)


def test_text_consists_of_whole_characters() -> None:
    euro = "€".encode()

    def decode(tokens: Sequence[int]) -> str:
        return bytes(euro[t % 3] for t in tokens).decode(errors="replace")

    engine = Engine(DecoderRunner(target()), PLAIN, detokenizer=lambda: Detokenizer(decode))
    request = Request(PROMPT, max_new_tokens=20)
    shown = "".join(u.text for u in run(engine, [request])[0])
    assert shown == decode(naive(target(), request))
