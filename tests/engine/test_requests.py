"""Batches of unequal requests with every method: lengths, short draft contexts, failures, prefix caching."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count

import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.catalogue import BUILT_IN, BuildContext, Entry, build
from foretell.catalogue.config import SpeculativeConfig
from foretell.core.context import Context, StepResult
from foretell.core.sampling import SamplingParams
from foretell.draft import CrossTokenizerDrafter, DraftModel, NoDrafter, Retriever
from foretell.draft.base import Continuation
from foretell.engine.engine import Engine
from foretell.engine.groups import MethodGroups
from foretell.engine.method import AnyMethod, Method
from foretell.engine.prompt_chunks import PromptChunks
from foretell.engine.request import Completion, Request, Update, describe_error
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, RootOnly, Trie
from foretell.testing import TINY, letter_codec, tiny_decoder
from foretell.tokenizer.stream import Detokenizer
from helpers import (
    FAMILIES,
    STATES,
    VARIANTS,
    VOCAB,
    Variant,
    engine_for,
    letters,
    methods_by_kind,
    naive,
    of_catalogue,
    random_tokens,
    small_model,
    speculator,
    target,
    unchecked,
    wide_target,
)

every_entry = pytest.mark.parametrize("entry", methods_by_kind(BUILT_IN, of=STATES))
kernels_only = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())


class RaisingEngine(Engine):
    """Raises the exception of a step."""

    def _observe(self, groups: MethodGroups, step: StepResult) -> dict[int, Exception]:
        for group in groups.groups:
            group.method.observe(groups.result_of(group, step))
        return {}

    def step(self) -> list[Update]:
        with torch.inference_mode():
            self._scheduler.admit()
            return self._run_step(self._scheduler.schedule())


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(c.tokens) for c in completions]


def unequal(temperature: float) -> list[Request]:
    """Requests for 1, 2 and 3 tokens beside longer ones, which they join and leave."""
    lengths = ((9, 12), (5, 1), (3, 2), (7, 3), (12, 9), (4, 1))
    return [Request(random_tokens(n, seed=n), SamplingParams(temperature, seed=n), new) for n, new in lengths]


@cache
def wide_engine_texts(temperature: float) -> list[list[int]]:
    return tokens(wide_engine(PLAIN, 1).complete(unequal(temperature)))


def wide_engine(method: AnyMethod, rows: int) -> Engine:
    """The wide target on the CPU kernels."""
    return RaisingEngine(DecoderRunner(NativeDecoder(wide_target(), "float32")), method, rows=rows, chunk=8)


def wide_method(entry: Entry) -> AnyMethod:
    drafts = [DecoderRunner(NativeDecoder(wide_target(*w), "float32")) for w in ((5, 1), (0, 2))]
    trained = speculator(entry.speculator, wide=True) if entry.speculator else None
    return of_catalogue(entry, wide_target(), drafts, trained)


@pytest.mark.covering(1)
@kernels_only
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_entry
def test_requests_of_any_length_run_in_one_batch_on_the_kernels(entry: Entry, temperature: float) -> None:
    with unchecked():
        found = wide_engine(wide_method(entry), 2).complete(unequal(temperature))
        alone = [wide_engine(wide_method(entry), 1).complete([r])[0] for r in unequal(temperature)[:3]]
    assert [len(c.tokens) for c in found] == [r.max_new_tokens for r in unequal(temperature)]
    assert tokens(found[:3]) == tokens(alone)
    if entry.lossless and (entry.same_seed or temperature == 0):
        assert tokens(found) == wide_engine_texts(temperature)


@cache
def plain_texts(temperature: float) -> list[list[int]]:
    return [naive(target(), r) for r in unequal(temperature)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("variant", methods_by_kind(VARIANTS, of=FAMILIES))
def test_requests_of_any_length_run_in_one_batch(variant: Variant, temperature: float) -> None:
    with unchecked():
        found = RaisingEngine(DecoderRunner(target()), variant.make(VOCAB), rows=2).complete(unequal(temperature))
    assert [len(c.tokens) for c in found] == [r.max_new_tokens for r in unequal(temperature)]
    if variant.lossless and (variant.same_seed or temperature == 0):
        assert tokens(found) == plain_texts(temperature)


# Requests that fail.

BAD = 3
"""Length of the prompt of the request that fails."""


class Failing(Retriever):
    """Fails at a phase of every step that contains the request with the bad prompt."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def _check(self, phase: str, context: Context) -> None:
        if phase == self.phase and any(t.prompt_length == BAD and len(t.generated) > 2 for t in context.sequences):
            raise IndexError("out of bounds")

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        self._check("propose", context)
        return [[] for _ in context.rows]

    def observe(self, step: StepResult) -> None:
        self._check("observe", step.context)


class FailingRunner(DecoderRunner):
    """Fails to read one token."""

    token = -1

    def forward(self, rows, tree, **more):  # type: ignore[no-untyped-def]
        if (tree.token[tree.active] == self.token).any():
            raise RuntimeError("no memory\nand more")
        return super().forward(rows, tree, **more)


@pytest.mark.parametrize("phase", ["propose", "observe"])
def test_a_request_that_fails_ends_with_an_error_and_the_others_go_on(phase: str) -> None:
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=9) for n in (9, BAD, 5)]
    plain = [naive(target(), r) for r in requests]
    engine = engine_for(Method(Failing(phase), Trie(4), Match()))
    first, bad, last = engine.complete(requests, raise_errors=False)
    assert tokens([first, last]) == [plain[0], plain[2]]
    assert (bad.finish_reason, describe_error(bad.error or ValueError())) == ("error", "IndexError: out of bounds")
    assert list(bad.tokens) == plain[1][: len(bad.tokens)] and 3 <= len(bad.tokens) <= 4
    assert bad.statistics.new_tokens == len(bad.tokens)
    assert tokens(engine.complete([requests[0]])) == plain[:1], "the engine serves on"
    with pytest.raises(IndexError, match="out of bounds"):
        engine.complete(requests)
    assert not engine.busy


def test_a_pass_that_fails_ends_the_request_that_makes_it_fail() -> None:
    requests = [Request([n, *range(8)], max_new_tokens=6) for n in (11, 12, 13)]
    runner = FailingRunner(target())
    runner.token = 12
    engine = Engine(runner, Method(small_model(VOCAB), Chain(3), Rejection()), rows=3)
    found = engine.complete(requests, raise_errors=False)
    assert [c.finish_reason for c in found] == ["length", "error", "length"]
    assert describe_error(found[1].error or ValueError()) == "RuntimeError: no memory"


def test_a_detokenizer_that_fails_ends_its_own_request() -> None:
    class Broken(Detokenizer):
        def push(self, new):  # type: ignore[no-untyped-def]
            if made[0] is self:
                raise LookupError("no such token")
            return super().push(new)

    made: list[Detokenizer] = []

    def make() -> Detokenizer:
        made.append(Broken(letters))
        return made[-1]

    engine = Engine(DecoderRunner(target()), PLAIN, detokenizer=make)
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=5) for n in (4, 6)]
    found = engine.complete(requests, raise_errors=False)
    assert [c.finish_reason for c in found] == ["error", "length"]


# Drafters with a context shorter than the sequence.


def short_network(context: int = 40) -> DecoderRunner:
    return DecoderRunner(tiny_decoder(replace(TINY, vocab=VOCAB, layers=1, context=context), seed=5))


def short_parts(*kinds: str) -> BuildContext:
    return BuildContext(VOCAB, target(), speculators=tuple(speculator(k, context=40) for k in kinds))


SHORT: Mapping[str, Callable[[], AnyMethod]] = {
    "draft_model": lambda: Method(DraftModel(short_network()), Chain(4), Match()),
    "tree": lambda: build("dynamic_tree", BuildContext(VOCAB, target(), (short_network(),))),
    "mix": lambda: build("specinfer", BuildContext(VOCAB, target(), (short_network(), short_network(200)))),
    "cascade": lambda: build("cascade", BuildContext(VOCAB, target(), (short_network(), short_network()))),
    "nested cascade": lambda: build("cascade", BuildContext(VOCAB, target(), (short_network(200), short_network()))),
    "translated": lambda: Method(
        CrossTokenizerDrafter(DraftModel(short_network()), letter_codec(VOCAB), letter_codec(VOCAB, 2)),
        Trie(6),
        Match(),
    ),
    "hybrid": lambda: build("hybrid_model", BuildContext(VOCAB, target(), (short_network(),))),
    "hybrid eagle": lambda: build("hybrid_model", short_parts("eagle3")),
    "online": lambda: build("online", short_parts("draft_model")),
    "trained": lambda: build("draft_model", short_parts("draft_model")),
    "eagle": lambda: build("eagle", short_parts("eagle")),
    "eagle3": lambda: build("eagle3", short_parts("eagle3")),
    "sampled eagle3": lambda: build(
        "eagle3", short_parts("eagle3"), SpeculativeConfig(draft_sample_method="probabilistic")
    ),
}


@cache
def beyond_the_context() -> tuple[list[Request], list[list[int]]]:
    lengths = ((170, 20), (30, 60), (5, 12), (7, 15))
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=new) for n, new in lengths]
    return requests, [naive(target(), r) for r in requests]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.exhaustive if n in ("sampled eagle3", "nested cascade", "tree") else ())
        for n in SHORT
    ],
)
def test_sequences_beyond_the_draft_context_are_decoded_plainly(name: str) -> None:
    """One prompt is too long, one sequence grows too long, one stays short, one follows the long one in its row."""
    requests, expected = beyond_the_context()
    with unchecked():
        # Hybrids draft where the times of passes say that it pays: a clock of its own makes these times the same.
        clock = partial(next, count(0.0, 0.001))
        engine = RaisingEngine(DecoderRunner(target()), SHORT[name](), rows=3, chunk=64, clock=clock)
        found = engine.complete(requests)
    assert tokens(found) == expected
    drafted = [c.statistics.drafted for c in found]
    assert min(drafted[1:]) > 0
    if name not in ("nested cascade", "hybrid", "hybrid eagle"):
        assert drafted[0] == 0


@kernels_only
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model", "dynamic_tree"])
def test_sequences_beyond_the_draft_context_are_decoded_plainly_on_the_kernels(kind: str) -> None:
    if kind.startswith("eagle"):
        parts = BuildContext(VOCAB, wide_target(), speculators=(speculator(kind, wide=True, context=40),))
    else:
        small = tiny_decoder(replace(wide_target().config, layers=1, context=40), 5, torch.float32)
        parts = BuildContext(VOCAB, wide_target(), (DecoderRunner(NativeDecoder(small, "float32")),))
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=new) for n, new in ((170, 20), (30, 60), (5, 12))]
    options = {"num_draft_tokens": 8} if kind == "eagle3" else None
    found = wide_engine(build(kind, parts, options), 2).complete(requests)
    assert tokens(found) == tokens(wide_engine(PLAIN, 1).complete(requests))
    assert [c.statistics.drafted > 0 for c in found] == [False, True, True]


# Prompt chunks.


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.exhaustive), "eagle3"])
def test_sampled_drafts_of_eagle_do_not_depend_on_the_chunk_size(kind: str) -> None:
    parts = BuildContext(VOCAB, target(), speculators=(speculator(kind),))
    config = SpeculativeConfig(draft_sample_method="probabilistic")
    requests = [Request(random_tokens(13, seed=s), SamplingParams(1.0, seed=s), 12) for s in range(3)]
    texts = {}
    with unchecked():
        for chunk in (512, 12, 6, 4):
            engine = engine_for(build(kind, parts, config), rows=1, chunk=chunk)
            texts[chunk] = tokens(engine.complete(requests))
    assert texts[12] == texts[6] == texts[4] == texts[512]


# Cached prefixes.


def conversation(method: AnyMethod, prefix_caching: bool) -> list[Completion]:
    """Three turns, each a continuation of the one before (the third after part of the second answer only), then a new
    prompt.
    """
    engine = Engine(DecoderRunner(target()), method, rows=1, chunk=16, prefix_caching=prefix_caching)
    text, found = random_tokens(21, seed=1), list[Completion]()
    for turn in range(4):
        prompt = random_tokens(9, seed=7) if turn == 3 else text
        found += engine.complete([Request(prompt, SamplingParams(1.0, seed=turn), max_new_tokens=8)])
        answer = found[-1].tokens[: 5 if turn == 1 else None]
        text = [*text, *answer, *random_tokens(4, seed=turn)]
    return found


@pytest.mark.parametrize("variant", methods_by_kind(VARIANTS, of=FAMILIES))
def test_a_cached_prefix_changes_no_answer(variant: Variant) -> None:
    with unchecked():
        plain, cached = (conversation(variant.make(VOCAB), yes) for yes in (False, True))
    assert tokens(cached) == tokens(plain)
    assert [c.statistics.cached_tokens for c in plain] == [0] * 4
    # All but the last common token; the third turn contains five tokens of the second answer. Where answers leave
    # inexact keys, prompts alone are reused.
    exact = variant.make(VOCAB).draft.exact_keys
    expected = [21 + 8 - 1, 21 + 8 + 4 + 5 - 1] if exact else [21 - 1, 21 + 8 + 4 - 1]
    assert [c.statistics.cached_tokens for c in cached] == [0, *expected, 0]
    if variant.same_seed and not variant.make(VOCAB).tree.elastic:  # whose trees follow the times of passes
        assert [c.statistics.drafted > 0 for c in cached] == [c.statistics.drafted > 0 for c in plain]


@kernels_only
@pytest.mark.parametrize("name", ["autoregressive", "eagle3", "draft_model", "dynamic_tree", "sam_recycling"])
def test_a_cached_prefix_gives_the_same_bits_on_the_kernels(name: str) -> None:
    entry = next(e for e in BUILT_IN if e.name == name)
    found = []
    for yes in (False, True):
        runner = DecoderRunner(NativeDecoder(wide_target(), "float32"))
        engine = Engine(runner, wide_method(entry), rows=1, chunk=8, prefix_caching=yes)
        (first,) = engine.complete([Request(random_tokens(30, seed=2), max_new_tokens=20)])
        prompt = [*random_tokens(30, seed=2), *first.tokens, *random_tokens(3, seed=4)]
        found += engine.complete([Request(prompt, max_new_tokens=20, logprobs=True)])
    assert found[0].tokens == found[1].tokens and found[0].logprobs == found[1].logprobs
    assert found[1].statistics.cached_tokens >= 48
    if name != "eagle3":  # whose trees follow the times of passes
        assert found[0].statistics.drafted == found[1].statistics.drafted


def test_a_prompt_goes_to_the_row_that_holds_most_of_it() -> None:
    engine = Engine(DecoderRunner(target()), PLAIN, rows=3, prefix_caching=True)
    one, two = random_tokens(10, seed=1), random_tokens(12, seed=2)
    first, second = engine.complete([Request(p, max_new_tokens=4) for p in (one, two)])
    asked = [Request([*one, *first.tokens, 3], max_new_tokens=2), Request([*two, *second.tokens], max_new_tokens=2)]
    found = engine.complete(asked)
    assert [c.statistics.cached_tokens for c in found] == [13, 15]
    assert tokens(found) == [naive(target(), r) for r in asked]
    number = engine.submit(Request(random_tokens(90, seed=3), max_new_tokens=2))
    engine._scheduler.chunks = PromptChunks(16)
    engine.step()
    assert engine.cancel(number) is not None
    (again,) = engine.complete([Request(random_tokens(90, seed=3), max_new_tokens=3)])
    assert again.statistics.cached_tokens == 16, "tokens of a cancelled prompt that were read"
    assert list(again.tokens) == naive(target(), Request(random_tokens(90, seed=3), max_new_tokens=3))
