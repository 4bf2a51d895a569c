"""What interrupts a request (a pass that raises, a preemption, a pause, what a row held before) changes no text."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import pytest

from foretell.accept import Match, Rejection, TypicalAcceptance
from foretell.catalogue import BuildContext, build
from foretell.core.context import StepResult
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request, Update
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, LLMCadTree
from helpers import (
    VARIANTS,
    VOCAB,
    Interrupted,
    TinyCheckpoint,
    Variant,
    fail,
    interrupted,
    naive,
    pause,
    preempt,
    random_tokens,
    sibling,
    small_model,
    speculator,
    target,
    unchecked,
)

TEMPERATURE = 4.0
"""So flat are the distributions of the tiny models then that a text of sampled drafts depends on the depth of each."""
REDUCED = {"skip_decode_lossy"}
"""Methods whose cache is not that of passes of all layers: docs/lossless.md names them."""


def _sampled(name: str, context: int = 256, **options: object) -> Variant:
    """A method that drafts with hidden states, with sampled drafts. `context`: the longest text that it reads."""

    def make(vocab: int) -> AnyMethod:
        network = target(vocab)
        trained = () if name == "mtp" else (speculator(name, vocab, context=context),)
        checkpoint = TinyCheckpoint(network) if name == "mtp" else None
        parts = BuildContext(vocab, network, speculators=trained, checkpoint=checkpoint)
        return build(name, parts, {"draft_sample_method": "probabilistic", "num_draft_tokens": 3, **options})

    kind = "_short" * (context < 256) + "_window" * bool(options)
    return Variant(f"{name}_sampled{kind}", make, same_seed=False)


WITH_STATE = (
    *(_sampled(name) for name in ("eagle", "eagle3", "mtp", "dflash", "p_eagle", "mlp_speculator")),
    _sampled("eagle3", prompt_window=20),
    _sampled("eagle3", context=64),
    Variant("adaptive", lambda v: Method(small_model(v), Chain(6, adaptive=True), Rejection()), same_seed=False),
    Variant(
        "typical_llmcad",
        lambda v: Method(small_model(v), LLMCadTree(6, threshold=0.1), TypicalAcceptance(0.5, delta=10.0)),
        lossless=False,
        same_seed=False,
    ),
)
"""Methods whose drafts change the text and depend on what drafter or shape keep of a request."""
STATE = (
    "eagle3_sampled", "dflash_sampled", "mlp_speculator_sampled", "adaptive", "pass_apart",
    "layer_skip", "typical_llmcad",
)  # fmt: skip
"""One of each thing that is kept of a request."""
EVERY = {v.name: v for v in (*VARIANTS, *WITH_STATE)}
SAME_SEED = {v.name for v in EVERY.values() if v.same_seed}
"""Their text does not depend on drafts."""


def some_of(*names: str, without: Collection[str] = ()) -> pytest.MarkDecorator:
    """These methods; among the exhaustive tests all others, too."""
    marks = {name: () if name in names else pytest.mark.exhaustive for name in EVERY if name not in without}
    return pytest.mark.parametrize("variant", [pytest.param(EVERY[n], marks=m, id=n) for n, m in marks.items()])


def engine_of(method: AnyMethod, rows: int, chunk: int = 64, prefix_caching: bool = False) -> Engine:
    return Engine(Interrupted(target()), method, rows=rows, chunk=chunk, prefix_caching=prefix_caching)


def requests() -> list[Request]:
    return [
        Request(random_tokens(5 + 4 * i, seed=i), SamplingParams(TEMPERATURE, seed=i), 24 + 4 * i) for i in range(3)
    ]


def tokens(engine: Engine, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    return [c.tokens for c in engine.complete(asked)]


@cache
def uninterrupted(variant: Variant) -> list[tuple[int, ...]]:
    """The texts of the requests."""
    return tokens(engine_of(variant.make(VOCAB), 3), requests())


@some_of("eagle3_sampled", "mtp_sampled")
def test_a_pass_that_raises_between_drafts_and_observation_changes_no_text(variant: Variant) -> None:
    with unchecked():
        engine = engine_of(variant.make(VOCAB), 3)
        assert interrupted(engine, requests(), fail) == uninterrupted(variant)
    assert isinstance(engine.runner, Interrupted)
    assert engine.runner.failures > 0


@some_of(*STATE, without=REDUCED)
def test_preempted_requests_of_every_method_get_the_same_text(variant: Variant) -> None:
    """A full cache interrupts steps after their drafts were made."""
    with unchecked():
        engine = engine_of(variant.make(VOCAB), 3)
        assert interrupted(engine, requests(), preempt) == uninterrupted(variant)
    assert engine.preemptions > 0


@some_of("eagle3_sampled", "HeuristicSchedule", "pass_apart", "layer_skip", without=REDUCED)
def test_paused_requests_of_every_method_get_the_same_text(variant: Variant) -> None:
    with unchecked():
        engine = engine_of(variant.make(VOCAB), 3)
        assert interrupted(engine, requests(), pause) == uninterrupted(variant)


@some_of("eagle3_sampled", "mtp_sampled", "mlp_speculator_sampled", "adaptive", without=REDUCED)
def test_a_paused_request_goes_on_beside_an_equal_one_that_is_ahead(variant: Variant) -> None:
    """It takes a copy of the other's row."""
    asked, texts = requests()[2], defaultdict[int, list[int]](list)
    with unchecked():
        engine = engine_of(variant.make(VOCAB), 4, prefix_caching=True)
        paused = engine.submit(asked)
        ahead = engine.submit(asked)

        def take(updates: Sequence[Update]) -> None:
            for update in updates:
                assert update.error is None
                texts[update.request] += update.tokens

        while len(texts[paused]) < 5:
            take(engine.step())
        engine.pause(paused)
        for _ in range(3):
            take(engine.step())
        engine.resume(paused)
        for update in engine.run():
            take([update])
        assert [tuple(texts[paused]), tuple(texts[ahead])] == [uninterrupted(variant)[2]] * 2


@some_of("eagle3_sampled_window", "dflash_sampled", without=SAME_SEED)
def test_what_a_row_held_before_changes_no_text(variant: Variant) -> None:
    """A longer request; one that is longer beside one of another method, whose row gets a copy of the prefix."""
    shared = random_tokens(40, seed=5)
    asked = [Request([*shared, *random_tokens(n, seed=n)], SamplingParams(TEMPERATURE, seed=n), 14) for n in (1, 9)]
    longer = Request([*shared, *random_tokens(70, seed=8)], max_new_tokens=3)
    other = Request(random_tokens(7, seed=3), max_new_tokens=3, method=EVERY["ngram"].make(VOCAB))
    with unchecked():
        expected = [tokens(engine_of(variant.make(VOCAB), 2), [r])[0] for r in asked]
        for before in ([longer], [other, longer]):
            engine = engine_of(variant.make(VOCAB), 2, prefix_caching=True)
            engine.complete(before)
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

    drafting = Method(Watched(DecoderRunner(sibling())), Chain(4, draw=False), Match())
    plain, greedy = (
        EVERY["autoregressive"].make(VOCAB),
        [replace(r, sampling_params=SamplingParams()) for r in requests()],
    )
    asked = [*greedy, Request(random_tokens(40, seed=9), max_new_tokens=12, method=drafting)]
    with unchecked():
        engine = engine_of(plain, 4, chunk=4)
        drafted = 4

        def wait(engine: Engine, number: int) -> None:
            preempt(engine, drafted)

        assert interrupted(engine, asked, wait) == [tuple(naive(target(), replace(r, method=None))) for r in asked]
    assert engine.preemptions and committed and not any(committed)


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
