"""Chunks of prompts keep the time between tokens on a simulated machine, and change no answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_requests import PLAIN, every_entry, kernels_only, wide_method

from foretell.catalogue import Entry
from foretell.core.context import ModelOutput
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree
from foretell.engine.engine import Engine
from foretell.engine.prompt_chunks import PromptChunks
from foretell.engine.request import Request
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from helpers import random_tokens, target, unchecked, wide_target

TARGET = 0.25
Machine = Callable[[int, int], float]
"""Seconds of a step by its prompt tokens, and by the tokens of the prompt that were read before."""


def machine(token: float, step: float, noise: float = 0.1, stalls: float = 0.0) -> Machine:
    rng = np.random.default_rng(0)

    def seconds(tokens: int, before: int) -> float:
        stalled = 2.0 if rng.random() < stalls else 0.0
        return (step + tokens * token * (1 + before / 4000)) * float(rng.lognormal(0, noise)) + stalled

    return seconds


MACHINES = {
    "a slow machine": machine(0.010, 0.060),
    "a fast machine": machine(0.00002, 0.005),
    "a very slow machine": machine(0.030, 0.150),
    "held up now and then": machine(0.006, 0.030, stalls=0.05),
    "noisy": machine(0.006, 0.030, noise=0.3),
}


def read(chunks: PromptChunks, seconds: Machine, length: int, decoding: bool = True) -> tuple[list[float], list[int]]:
    """Times and sizes of the steps that read a prompt."""
    times, sizes, before = list[float](), list[int](), 0
    while before < length:
        size = min(chunks.size(decoding), length - before)
        times.append(seconds(size, before))
        sizes.append(size)
        chunks.update(size, decoding, times[-1])
        before += size
    return times, sizes


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("history", ["none", "answers", "short prompts", "a prompt alone"])
def test_a_long_prompt_keeps_the_time_between_tokens_on_any_machine(name: str, history: str) -> None:
    chunks, seconds = PromptChunks(512, TARGET), MACHINES[name]
    if history != "none":
        for _ in range(50):
            chunks.update(0, True, seconds(0, 0))
    if history == "short prompts":
        for tokens in (3, 5, 2, 4, 3, 2, 5, 4, 3):
            chunks.update(tokens, True, seconds(tokens, 0))
    if history == "a prompt alone":
        read(chunks, seconds, 2000, decoding=False)
    times, sizes = read(chunks, seconds, 7000)
    bare, steps = seconds(0, 0), np.array(times)
    assert np.median(steps) < 1.25 * max(TARGET, bare)
    assert np.quantile(steps, 0.9) < 2 * max(TARGET, bare) and sizes[0] <= 32
    if name == "a fast machine":
        assert np.median(sizes) == 512
    else:
        assert np.median(steps) > 0.6 * TARGET, "prompts get what the target leaves"


@pytest.mark.parametrize("decoding", [True, False])
def test_an_estimate_of_a_machine_that_stood_still_does_not_stay(decoding: bool) -> None:
    chunks, seconds = PromptChunks(512, TARGET), machine(0.001, 0.02)
    read(chunks, seconds, 3000, decoding)
    for _ in range(20):
        chunks.update(chunks.size(decoding), decoding, 60.0)
    assert chunks.size(decoding) == 2
    _, sizes = read(chunks, seconds, 3000, decoding)
    assert max(sizes) > 100 and sum(size < 50 for size in sizes) < 15


def test_prompts_go_on_beside_answers_that_take_all_the_time() -> None:
    chunks, seconds = PromptChunks(512, TARGET), machine(0.001, 0.5, noise=0)
    for _ in range(9):
        chunks.update(0, True, seconds(0, 0))
    times, sizes = read(chunks, seconds, 3000)
    assert 30 < np.median(sizes) < 70 and max(times) < 0.6


def test_a_prompt_alone_does_not_keep_a_new_request_waiting_for_long() -> None:
    """A request that arrives waits for the end of the step."""
    for token in (0.010, 0.0001):
        times, sizes = read(PromptChunks(512, TARGET), machine(token, 0.02), 7000, decoding=False)
        assert max(times) < 6 * TARGET and np.median(sizes) == (512 if token < 0.001 else np.median(sizes))
    assert PromptChunks(512).size(decoding=False) == PromptChunks(512).size(decoding=True) == 512


class Clock:
    """Simulated seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(DecoderRunner):
    """A runner whose passes take the time of a simulated machine."""

    def __init__(self, clock: Clock, seconds: Machine) -> None:
        super().__init__(target())
        self._clock, self._seconds = clock, seconds

    def forward(self, rows: Sequence[int], tree: TokenTree, **options: Any) -> ModelOutput:
        read = int(tree.prefix_length.sum()) - len(rows)
        self._clock.now += self._seconds(max(read, 0), 0)
        return super().forward(rows, tree, **options)


def test_the_engine_keeps_the_time_between_the_tokens_of_an_answer() -> None:
    clock = Clock()
    runner = TimedRunner(clock, machine(0.0005, 0.01))
    engine = Engine(runner, PLAIN, rows=3, chunk=128, clock=clock, itl_target=0.03)
    engine.submit(Request([1, 2], max_new_tokens=60))
    for _ in range(3):
        engine.step()
    engine.submit(Request(random_tokens(220, seed=2), max_new_tokens=2))
    engine.submit(Request(random_tokens(200, seed=3), max_new_tokens=2))
    gaps, last = list[float](), clock.now
    with unchecked():
        while engine.prompt_progress[0] < engine.prompt_progress[1]:
            assert 1 in {u.request for u in engine.step()}
            gaps.append(clock.now - last)
            last = clock.now
    assert max(gaps) < 0.045 and 0.02 < np.median(gaps) < 0.035


def test_a_target_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0 seconds"):
        PromptChunks(512, target=0)


class RandomChunks(PromptChunks):
    """Sizes as no measured time gives them."""

    def __init__(self, seed: int) -> None:
        super().__init__(64)
        self._rng = np.random.default_rng(seed)

    def size(self, decoding: bool) -> int:
        return int(self._rng.choice([1, 2, 3, 5, 8, 13, 64]))


REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=n % 2, seed=n), max_new_tokens=12, logprobs=2)
    for n in (40, 3, 25, 60)
]


_TORCH_IN_THE_KERNELS_CACHE = ("sparse_mlp_draft", "matformer_draft")
"""What `wide_method` builds of these: a draft network that no program puts together with the kernels' target."""


@kernels_only
@every_entry
def test_answers_have_the_same_bits_whatever_the_chunks(entry: Entry) -> None:
    """Also where the text of a seed depends on the drafts."""

    def answers(chunks: PromptChunks, prefix_caching: bool) -> list[tuple[object, ...]]:
        runner = DecoderRunner(NativeDecoder(wide_target(), "float32"))
        engine = Engine(runner, wide_method(entry), rows=4, prefix_caching=prefix_caching)
        engine._scheduler.chunks = chunks
        with unchecked():
            completions = engine.complete([replace(r) for r in REQUESTS])
        return [(c.tokens, c.logprobs, c.top_logprobs) for c in completions]

    expected = answers(PromptChunks(512), False)
    for seed in range(2):
        found = answers(RandomChunks(seed), bool(seed))
        if entry.name in _TORCH_IN_THE_KERNELS_CACHE:
            assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
        else:
            assert found == expected
