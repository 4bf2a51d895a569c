"""What one pass of the target costs: interleaved with other runtimes and other sizes, so that drift of the machine
cancels in the ratios.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from foretell.api import Model
from foretell.bench.peers.base import Stepper
from foretell.bench.stepper import EngineStretches, OwnStepper, Stretch
from foretell.roofline.analysis import AnalyzedModel as PricedModel
from foretell.roofline.analysis import analyse
from foretell.roofline.calibrate import pass_workload
from foretell.roofline.cost import scalar
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware

_BURST = 3
"""Passes per turn of a contender; the first, which still finds another's data in the caches, is not counted."""


class Pass(BaseModel):
    """Time of one pass over `tokens` new tokens, in milliseconds; `samples` by round."""

    model_config = ConfigDict(frozen=True)

    contender: str
    tokens: int
    median_ms: float
    samples: tuple[float, ...]
    bytes: float | None = None
    """Bytes of weights and cache that the pass must read or write; None: not counted (other runtimes)."""


class Figure(BaseModel):
    """A ratio that the project promises, with its goal."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: float
    goal: float
    at_most: bool
    """The goal is an upper bound."""

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal if self.at_most else self.value >= self.goal


class Throughput(BaseModel):
    """Plain decoding of `rows` texts at once, tokens per second."""

    model_config = ConfigDict(frozen=True)

    contender: str
    rows: int
    tokens_per_second: float


class StepReport(BaseModel):
    """What `foretell bench step` measured."""

    model_config = ConfigDict(frozen=True)

    format: str = "foretell step 1"
    model: str
    context: int
    threads: int
    device: str = "cpu"
    bandwidth: float | None = None
    """Bytes per second of reading memory, measured on this device."""
    machine: Mapping[str, str]
    passes: tuple[Pass, ...]
    throughput: tuple[Throughput, ...]
    figures: tuple[Figure, ...]


Tick = Callable[[str], None]


def time_passes(
    steppers: Sequence[Stepper], text: Sequence[int], tokens: Sequence[int], repeats: int, tick: Tick
) -> list[Pass]:
    """Every contender over every number of new tokens, in turn, `repeats` times round; one round before goes
    uncounted.
    """
    for stepper in steppers:
        stepper.hold(text)
    samples: dict[tuple[str, int], list[float]] = {(s.name, n): [] for s in steppers for n in tokens}
    for r in range(repeats + 1):
        # Alternate the direction, so that nobody always follows the same neighbour.
        for stepper in steppers if r % 2 else list(reversed(steppers)):
            for n in tokens:
                new = [text[i % len(text)] for i in range(n)]
                taken = median([_one(stepper, new) for _ in range(_BURST)][1:])
                if r:
                    samples[stepper.name, n].append(taken * 1e3)
        tick(f"round {r} of {repeats}")
    return [Pass(contender=c, tokens=n, median_ms=median(s), samples=tuple(s)) for (c, n), s in samples.items()]


def _one(stepper: Stepper, tokens: Sequence[int]) -> float:
    started = time.perf_counter()
    stepper.read(tokens)
    taken = time.perf_counter() - started
    stepper.forget()
    return taken


def over(passes: Sequence[Pass], above: tuple[str, int], below: tuple[str, int]) -> float | None:
    """Median over the rounds of the ratio of two times; None if one was not measured."""
    found = {(p.contender, p.tokens): p.samples for p in passes}
    if above not in found or below not in found:
        return None
    return median(a / b for a, b in zip(found[above], found[below], strict=True))


def time_engines(
    models: Sequence[Model], text: Sequence[int], rows: Sequence[int], repeats: int, tick: Tick
) -> tuple[dict[tuple[str, int], list[Stretch]], list[Stretch]]:
    """Stretches of plain decoding by (contender, rows), and of prompt lookup at batch 1 with the first model, in
    turn.
    """
    steps = 4
    # Prompt lookup decides up to 11 tokens a step; the texts must not end.
    most = 12 * steps * (repeats + 2)
    plain = {
        (f"foretell {m.precision}", r): EngineStretches(m, "autoregressive", r, text, most)
        for m in models
        for r in rows
    }
    lookup = EngineStretches(models[0], "ngram", 1, text, most)
    out: dict[tuple[str, int], list[Stretch]] = {k: [] for k in plain}
    looked = []
    for r in range(repeats):
        for key, engine in plain.items():
            out[key].append(engine.run(steps))
        looked.append(lookup.run(steps))
        tick(f"engine round {r + 1} of {repeats}")
    return out, looked


def throughput(stretches: Mapping[tuple[str, int], Sequence[Stretch]]) -> list[Throughput]:
    """Median tokens per second of every contender and batch size."""
    return [
        Throughput(contender=c, rows=r, tokens_per_second=median(s.tokens / s.seconds for s in parts))
        for (c, r), parts in stretches.items()
    ]


def figures(passes: Sequence[Pass], speeds: Sequence[Throughput], looked: Sequence[Stretch]) -> list[Figure]:
    """The promised ratios, as far as what they need was measured."""
    bf16, int8 = "foretell bfloat16", "foretell int8"
    wanted = [
        (
            "pass of 1 token, bfloat16 over transformers eager bfloat16",
            (bf16, 1),
            ("transformers eager bfloat16", 1),
            0.40,
        ),
        ("pass of 1 token, bfloat16 over llama.cpp bf16", (bf16, 1), ("llama.cpp bf16", 1), 1.0),
        ("chain of 8 over 1 token, bfloat16", (bf16, 8), (bf16, 1), 1.25),
        ("chain of 16 over 1 token, bfloat16", (bf16, 16), (bf16, 1), 1.6),
        ("binary tree of 8 over 1 token, bfloat16", (bf16 + " tree", 8), (bf16, 1), 1.25),
        ("binary tree of 16 over 1 token, bfloat16", (bf16 + " tree", 16), (bf16, 1), 1.6),
        ("pass of 1 token, int8 over bfloat16", (int8, 1), (bf16, 1), 0.7),
        ("chain of 8 over 1 token, int8", (int8, 8), (int8, 1), 1.4),
    ]
    out = []
    for name, above, below, goal in wanted:
        value = over(passes, above, below)
        if value is not None:
            out.append(Figure(name=name, value=value, goal=goal, at_most=True))
    by_rows = {(s.contender, s.rows): s.tokens_per_second for s in speeds}
    out += [
        Figure(
            name=f"plain decoding of 16 texts over 1, tokens/s, {c}",
            value=speed / by_rows[c, 1],
            goal=5.0,
            at_most=False,
        )
        for (c, rows), speed in by_rows.items()
        if rows == 16 and (c, 1) in by_rows
    ]
    if looked:
        outside = median(1 - s.verify / s.seconds for s in looked)
        out.append(
            Figure(
                name="share of a step outside the target pass, prompt lookup, batch 1",
                value=outside,
                goal=0.08,
                at_most=True,
            )
        )
    return out


def contenders(models: Sequence[Model]) -> list[Stepper]:
    """Our own: a chain per model, and a branching tree for each too."""
    return [s for m in models for s in OwnStepper.all_of(m)]


_BITS = {"float32": "32", "bfloat16": "16", "int8": "8"}
_ANY_HARDWARE = Hardware("any", "any", 1.0, {"any": 1.0}, "")
"""Bytes do not depend on the device."""


def pass_bytes(model: Model, tokens: int, context: int) -> float:
    """Bytes of weights and cache that one pass over `tokens` new tokens must move, by the roofline's count."""
    asked = pass_workload(parse_format(_BITS[model.precision]), tokens, context)
    total = analyse(PricedModel(model.name, model.config), _ANY_HARDWARE, asked).total
    return scalar(total.weights + total.kv_read + total.kv_write)


def with_bytes(passes: Sequence[Pass], models: Sequence[Model], context: int) -> list[Pass]:
    """The passes of our own contenders with the bytes that they must move."""
    own = {f"foretell {m.precision}": m for m in models}

    def counted(p: Pass) -> Pass:
        model = own.get(" ".join(p.contender.split()[:2]))
        return p if model is None else p.model_copy(update={"bytes": pass_bytes(model, p.tokens, context)})

    return [counted(p) for p in passes]
