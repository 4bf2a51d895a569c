"""Times of engine steps outside the target's pass, for `foretell roofline calibrate --methods`."""

import time
from collections.abc import Iterator, Sequence

from foretell.api import Model
from foretell.bench.competitor import MethodSpec
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.roofline.drafting_time import DraftingSample

BATCHES = (1, 2, 6, 14)
"""Requests decoded together; predictions are checked at other numbers, on other prompts."""
STEPS = 30
"""Steps timed with each number of requests."""
_WARM_UP = 3
"""Steps after the prompts that are not timed."""
_TEXTS = (
    "Describe how a canal lock lifts a boat, step by step, and then describe how it lowers one, step by step.",
    "Write a short letter to a landlord about a broken heater. Then write the answer of the landlord.",
    "List the planets of the solar system with one sentence about each of them.",
    "Write a Python class for a queue with the methods push, pop and size, and explain every method.",
    "A shop sells pencils at 3 for a dollar and pens at 2 dollars each. What do 12 pencils and 5 pens cost? Explain.",
    "Explain to a child why the sea is salty, and why rivers are not.",
    "Repeat this recipe with all quantities doubled: 200 g flour, 100 g butter, 50 g sugar, 2 eggs, a pinch of salt.",
    "Tell the story of a fox who learns to fish in a frozen lake, in ten sentences.",
)
PROMPTS = tuple(f"{text} {end}" for end in ("Write plainly.", "Then give a summary.") for text in _TEXTS)
"""Of this module alone: no benchmark has them."""


def drafting_samples(model: Model, method: MethodSpec) -> Iterator[DraftingSample]:
    """Steps of a method, after its prompts, with several numbers of requests at a time.

    Raises:
        ValueError: the method cannot be built for this model.
    """
    prompts = [model.tokens(text) for text in PROMPTS]
    for requests in BATCHES:
        yield from _time_steps(
            Engine(model.runner(), model.method(method.method, method.config), rows=requests), prompts[:requests]
        )


def _time_steps(engine: Engine, prompts: Sequence[Sequence[int]]) -> Iterator[DraftingSample]:
    numbers = [engine.submit(Request(p, max_new_tokens=1 << 10)) for p in prompts]
    decoded, prompt = 0, sum(map(len, prompts)) // len(prompts)
    while decoded < _WARM_UP + STEPS and engine.busy:
        started = time.perf_counter()
        engine.step()
        seconds, step = time.perf_counter() - started, engine.last_step
        if step.counts.reads_prompt:
            continue
        decoded += 1
        if decoded > _WARM_UP:
            counts = step.counts
            yield DraftingSample(
                counts.requests, counts.drafted, seconds - step.verify, counts.read, prompt + decoded, step.verify
            )
    for number in numbers:
        engine.cancel(number)
