"""A key-value cache of limited size: requests wait for blocks, are preempted, and get the same texts."""

import pytest

from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Completion, Request
from foretell.model.cache.block_table import BLOCK_SLOTS
from foretell.model.cache.kv_cache import KVCache
from foretell.model.run.decoder_runner import DecoderRunner
from helpers import VARIANTS, VOCAB, random_tokens, target, unchecked

NAMES = ("autoregressive", "ngram", "eagle3", "jacobi")


def method(name: str) -> AnyMethod:
    return next(v for v in VARIANTS if v.name == name).make(VOCAB)


def engine_of(blocks: int | None, name: str, prefix_caching: bool = False) -> Engine:
    runner = DecoderRunner(target())
    assert isinstance(runner.cache, KVCache)
    size = None if blocks is None else blocks * runner.cache.block_bytes
    return Engine(runner, method(name), rows=4, chunk=48, prefix_caching=prefix_caching, cache_bytes=size)


def blocks_in_use(engine: Engine) -> int:
    assert isinstance(engine.runner, DecoderRunner)
    assert isinstance(engine.runner.cache, KVCache)
    return engine.runner.cache.blocks.blocks_in_use


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.tokens for c in completions]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "name",
    ["eagle3", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("jacobi", "autoregressive", "ngram"))],
)
def test_preempted_requests_get_the_same_texts(name: str, temperature: float) -> None:
    requests = [
        Request(random_tokens(20 + 9 * i, seed=i), SamplingParams(temperature, seed=i), 70 - 5 * i) for i in range(4)
    ]
    with unchecked():
        expected = engine_of(None, name).complete(requests)
        engine = engine_of(5, name)
        found = engine.complete(requests)
    assert texts(found) == texts(expected)
    assert sum(c.statistics.preemptions for c in found) > 0
    assert blocks_in_use(engine) == 0


def test_ended_requests_are_kept_while_there_is_room_and_the_oldest_are_forgotten() -> None:
    prompts = [random_tokens(100, seed=i) for i in range(8)]
    with unchecked():
        engine = engine_of(10, "autoregressive", prefix_caching=True)
        for prompt in prompts:
            engine.complete([Request(prompt, max_new_tokens=5)])
        again = [engine.complete([Request(p, max_new_tokens=5)])[0] for p in reversed(prompts)]
    kept = [c.statistics.cached_tokens for c in again]
    # Ten blocks hold three ended requests of two blocks each beside one that runs and its drafts.
    assert kept == [99, 99, 99, 0, 0, 0, 0, 0]


def test_a_prefix_in_use_is_kept_when_the_request_that_read_it_is_forgotten() -> None:
    system, alone = random_tokens(2 * BLOCK_SLOTS, seed=9), engine_of(None, "eagle3")
    requests = [Request([*system, *random_tokens(30, seed=i)], max_new_tokens=20) for i in range(6)]
    with unchecked():
        engine = engine_of(6, "eagle3", prefix_caching=True)
        found = [engine.complete([r])[0] for r in requests]
        expected = [alone.complete([r])[0] for r in requests]
    assert texts(found) == texts(expected)
    assert all(c.statistics.cached_tokens >= len(system) - 1 for c in found[1:])


def test_a_request_that_can_never_fit_ends_with_an_error_that_says_why() -> None:
    with unchecked():
        engine = engine_of(2, "ngram")
        prompts = [random_tokens(200), random_tokens(20)]
        found = engine.complete([Request(p, max_new_tokens=9) for p in prompts], raise_errors=False)
    assert found[0].finish_reason == "error"
    assert isinstance(found[0].error, ValueError), "the server answers such errors with status 400"
    assert "the key-value cache is full, and needs room for 64 more tokens; ask for a shorter" in str(found[0].error)
    assert len(found[1].tokens) == 9


def test_a_preempted_request_is_cancelled_with_what_it_has() -> None:
    with unchecked():
        engine = engine_of(5, "autoregressive")
        numbers = [engine.submit(Request(random_tokens(20 + 9 * i, seed=i), max_new_tokens=70)) for i in range(4)]
        preempted = list[int]()
        while engine.busy and not preempted:
            engine.step()
            preempted = [
                n for n, statistics in engine.statistics.items() if statistics.preemptions and statistics.new_tokens
            ]
        update = engine.cancel(preempted[0])
    assert update is not None
    assert update.finish_reason == "cancelled"
    assert update.statistics is not None
    assert update.statistics.new_tokens > 0
    assert set(engine.statistics) == set(numbers) - {preempted[0]}


def test_a_long_prompt_takes_no_room_in_the_rows_beside_it() -> None:
    """Three answers that fit into a block each, and a prompt of three, with room for drafts of two."""
    engine = engine_of(8, "autoregressive")
    requests = [Request(random_tokens(20, seed=i), max_new_tokens=30) for i in range(3)]
    with unchecked():
        for request in requests:
            engine.submit(request)
        while any(not statistics.new_tokens for statistics in engine.statistics.values()):
            engine.step()
        engine.submit(Request(random_tokens(3 * BLOCK_SLOTS - 10, seed=3), max_new_tokens=5))
        while engine.busy:
            engine.step()
            assert blocks_in_use(engine) <= 6, "without drafts"
    assert engine.preemptions == 0
