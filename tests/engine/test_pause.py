"""Requests that are paused: others take their rows, their texts stay the same, and they can be cancelled."""

from collections import defaultdict

import pytest

from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from helpers import VARIANTS, VOCAB, random_tokens, target, unchecked

NAMES = ("autoregressive", "sam_recycling", "eagle3")


def engine_of(name: str, rows: int, prefix_caching: bool = True) -> Engine:
    method = next(v for v in VARIANTS if v.name == name).make(VOCAB)
    return Engine(DecoderRunner(target()), method, rows=rows, chunk=16, prefix_caching=prefix_caching)


def requests(temperature: float = 0.0) -> list[Request]:
    return [Request(random_tokens(20 + 9 * i, seed=i), SamplingParams(temperature, seed=i), 16) for i in range(3)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_paused_request_gets_the_same_text(name: str, temperature: float) -> None:
    with unchecked():
        expected = [c.tokens for c in engine_of(name, 1).complete(requests(temperature))]
        engine = engine_of(name, 1)
        numbers = [engine.submit(r) for r in requests(temperature)]
        found = defaultdict[int, list[int]](list)
        for turn in range(9):
            engine.pause(numbers[turn % 3])  # While it waits, reads its prompt and decodes.
            for update in (u for _ in range(3) for u in engine.step()):
                found[update.request] += update.tokens
            engine.resume(numbers[turn % 3])
        for update in engine.run():
            found[update.request] += update.tokens
        assert not engine.busy and [tuple(found[n]) for n in numbers] == expected


def test_a_pause_frees_the_row_and_keeps_the_tokens_in_the_cache() -> None:
    engine, (first, second, _) = engine_of("autoregressive", 2), requests()
    number = engine.submit(first)
    engine.step()
    engine.step()
    engine.pause(number)
    assert engine.load == (0, 0) and not engine.busy and number in engine.statistics
    engine.complete([second])
    engine.resume(number)
    read = engine.runner.length(0) + engine.runner.length(1)
    engine.step()
    assert engine.runner.length(0) + engine.runner.length(1) == read + 1, "no token was read again"


def test_a_paused_request_can_be_cancelled_and_what_is_over_cannot_be_paused() -> None:
    engine = engine_of("autoregressive", 1, prefix_caching=False)
    number = engine.submit(requests()[0])
    engine.step()
    engine.pause(number)
    engine.pause(number)
    last = engine.cancel(number)
    assert last is not None and last.finish_reason == "cancelled" and last.statistics is not None
    engine.pause(number)
    engine.resume(number)
    assert not engine.busy and not engine.statistics
