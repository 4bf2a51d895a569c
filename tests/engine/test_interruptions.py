"""What interrupts a request (a pass that raises, a preemption, a pause, what a row held before) changes no text."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foretell.accept import Match, Rejection, TypicalAcceptance
from foretell.catalogue import BuildContext, build
from foretell.core.context import StepResult
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request, Update
from foretell.model.cache.block_table import BLOCK_SLOTS, OutOfBlocksError
from foretell.model.cache.kv_cache import KVCache
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import AdaptiveChain, Chain, ConfidenceRule, HeuristicSchedule, LLMCadTree
from helpers import (
    VARIANTS,
    VOCAB,
    TinyCheckpoint,
    Variant,
    good_model,
    methods_by_kind,
    naive,
    random_tokens,
    speculator,
    target,
    unchecked,
)

REDUCED = {"skip_decode_lossy"}
"""Methods whose cache is not that of passes of all layers: docs/lossless.md names them."""


def _sampled(name: str, **options: object) -> Variant:
    """A method that drafts with hidden states, with sampled drafts."""

    def make(vocab: int) -> AnyMethod:
        network = target(vocab)
        trained = () if name == "mtp" else (speculator(name, vocab),)
        checkpoint = TinyCheckpoint(network) if name == "mtp" else None
        parts = BuildContext(vocab, network, speculators=trained, checkpoint=checkpoint)
        return build(name, parts, {"draft_sample_method": "probabilistic", "num_draft_tokens": 3, **options})

    return Variant(f"{name}_sampled" + "_window" * bool(options), make, same_seed=False)


def _adaptive(rule: HeuristicSchedule | ConfidenceRule) -> Variant:
    shape = Chain(3, confidence=0.1)
    return Variant(
        type(rule).__name__, lambda v: Method(good_model(v), AdaptiveChain(shape, rule), Rejection()), same_seed=False
    )


WITH_STATE = (
    *(_sampled(name) for name in ("eagle", "eagle3", "mtp", "dflash", "p_eagle", "mlp_speculator")),
    _sampled("eagle3", prompt_window=20),
    _adaptive(HeuristicSchedule()),
    _adaptive(ConfidenceRule(step=0.2, confidence_momentum=0.5)),
    Variant(
        "typical_llmcad",
        lambda v: Method(good_model(v), LLMCadTree(6, threshold=0.2), TypicalAcceptance()),
        lossless=False,
        same_seed=False,
    ),
)
"""Methods whose drafts change the text and depend on what drafter or shape keep of a request."""
WITH_STATE_PARAMETERS = [pytest.param(variant, id=variant.name) for variant in WITH_STATE]
every_method = pytest.mark.parametrize("variant", [*methods_by_kind(VARIANTS), *WITH_STATE_PARAMETERS])
every_uninterrupted = pytest.mark.parametrize(
    "variant", [*methods_by_kind([v for v in VARIANTS if v.name not in REDUCED]), *WITH_STATE_PARAMETERS]
)


class Interrupted(DecoderRunner):
    """A target of whose passes over several requests that decode some raise, after the drafts of a step."""

    calls = failures = 0
    every = 0
    error: Exception = MemoryError()

    def forward(self, rows, tree, **more):  # type: ignore[no-untyped-def]
        decodes = len(rows) > 1 and tree.is_decode
        self.calls += decodes
        if self.every and decodes and self.calls % self.every == 0:
            self.failures += 1
            raise self.error
        return super().forward(rows, tree, **more)


def engine_of(method: AnyMethod, rows: int, blocks: int | None = None, prefix_caching: bool = False) -> Engine:
    runner = Interrupted(target())
    assert isinstance(runner.cache, KVCache)
    size = None if blocks is None else blocks * runner.cache.block_bytes
    return Engine(runner, method, rows=rows, chunk=24, prefix_caching=prefix_caching, cache_bytes=size)


def requests(count: int = 3, new: int = 16) -> list[Request]:
    return [
        Request(random_tokens(13 + 9 * i, seed=i), SamplingParams(1.0, seed=i), new + 4 * i, priority=i)
        for i in range(count)
    ]


def tokens(engine: Engine, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    return [c.tokens for c in engine.complete(asked)]


@every_method
def test_a_pass_that_raises_between_drafts_and_observation_changes_no_text(variant: Variant) -> None:
    """Each request gets a pass of its own then; beside them some that read prompts, in steps without their drafts."""
    with unchecked():
        expected = tokens(engine_of(variant.make(VOCAB), 3), requests(new=30))
        engine = engine_of(variant.make(VOCAB), 3)
        assert isinstance(engine.runner, Interrupted)
        engine.runner.every = 2
        assert tokens(engine, requests(new=30)) == expected
        assert engine.runner.failures > 0


@every_uninterrupted
def test_preempted_requests_of_every_method_get_the_same_text(variant: Variant) -> None:
    """A full cache interrupts steps after their drafts were made."""
    with unchecked():
        expected = tokens(engine_of(variant.make(VOCAB), 3), requests(new=60))
        engine = engine_of(variant.make(VOCAB), 3)
        assert isinstance(engine.runner, Interrupted)
        engine.runner.every, engine.runner.error = 2, OutOfBlocksError(1)
        assert tokens(engine, requests(new=60)) == expected
    assert engine.preemptions > 0


@every_uninterrupted
def test_paused_requests_of_every_method_get_the_same_text(variant: Variant) -> None:
    """Others take the rows meanwhile; one of the others is equal, and ahead."""
    asked = [*requests(), requests()[0]]
    with unchecked():
        expected = tokens(engine_of(variant.make(VOCAB), 4), asked)
        engine = engine_of(variant.make(VOCAB), 2, prefix_caching=True)
        numbers, texts = [engine.submit(r) for r in asked], defaultdict[int, list[int]](list)

        def take(updates: Sequence[Update]) -> None:
            for update in updates:
                assert update.error is None
                texts[update.request] += update.tokens

        for turn in range(12):
            engine.pause(numbers[turn % 4])
            for _ in range(3):
                take(engine.step())
            engine.resume(numbers[turn % 4])
        for update in engine.run():
            take([update])
    assert [tuple(texts[n]) for n in numbers] == expected


@every_method
def test_what_a_row_held_before_changes_no_text(variant: Variant) -> None:
    """A longer request, one of another method, and one of the same prompt with another text after it."""
    shared = random_tokens(40, seed=5)
    asked = [Request([*shared, *random_tokens(n, seed=n)], SamplingParams(1.0, seed=n), 14) for n in (1, 9, 30)]
    other = next(v for v in VARIANTS if v.name == "ngram").make(VOCAB)
    before = [
        [Request([*shared, *random_tokens(70, seed=8)], max_new_tokens=9)],
        [Request(random_tokens(7, seed=3), max_new_tokens=3, method=other), Request(shared, max_new_tokens=3)],
        [Request(shared, max_new_tokens=30), Request(random_tokens(60, seed=2), max_new_tokens=3, method=other)],
    ]
    with unchecked():
        expected = [tokens(engine_of(variant.make(VOCAB), 2), [r])[0] for r in asked]
        for first in before:
            engine = engine_of(variant.make(VOCAB), 2, prefix_caching=True)
            engine.complete(first)
            assert [tokens(engine, [r])[0] for r in asked] == expected


def test_drafts_of_an_interrupted_step_are_not_committed_by_a_step_that_reads_a_prompt() -> None:
    """The only request of a drafter waits after it has drafted; its prompt is read again in the same row."""
    committed = list[int]()

    class Watched(DraftModel):
        def observe(self, step: StepResult) -> None:
            before = [self.runner.length(row) for row in step.context.rows]
            super().observe(step)
            after = [self.runner.length(row) for row in step.context.rows]
            committed.extend(b - a for a, b, new in zip(before, after, step.new_tokens, strict=True) if not new)

    small = next(v for v in VARIANTS if v.name == "draft_model").make(VOCAB).draft
    assert isinstance(small, DraftModel)
    plain = next(v for v in VARIANTS if v.name == "autoregressive").make(VOCAB)
    with unchecked():
        for length in range(2 * BLOCK_SLOTS - 16, 2 * BLOCK_SLOTS - 2):
            drafting = Method(Watched(DecoderRunner(small.runner.network)), Chain(4, draw=False), Match())  # type: ignore[attr-defined]
            asked = [Request(random_tokens(2, seed=i), max_new_tokens=80) for i in range(3)]
            asked.append(Request(random_tokens(length, seed=9), max_new_tokens=12, method=drafting, priority=1))
            engine = engine_of(plain, 4, blocks=6)
            engine._scheduler.chunks._most = 2
            assert tokens(engine, asked) == [tuple(naive(target(), replace(r, method=None))) for r in asked]
    assert committed and not any(committed)


def test_a_request_that_cannot_begin_leaves_its_method_free() -> None:
    class Broken:
        """A constraint that cannot start."""

        def start(self) -> int:
            raise LookupError("no grammar")

    method = next(v for v in VARIANTS if v.name == "draft_model").make(VOCAB)
    engine = engine_of(method, 1)
    with pytest.raises(LookupError):
        engine.submit(Request([1, 2], max_new_tokens=3, constraint=Broken()))  # type: ignore[arg-type]
    assert not engine.busy
    (other,) = engine_of(method, 1).complete([Request([1, 2], max_new_tokens=3)])
    assert len(other.tokens) == 3
