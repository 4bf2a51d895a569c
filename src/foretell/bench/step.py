"""Time of one forward pass of the target, interleaved with other runtimes and sizes.

Drift of the machine affects all alike, so it cancels in the ratios.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from foretell.api import Model
from foretell.bench.own_backend import EngineTimer, StepTiming
from foretell.bench.peers.base import ForwardBackend
from foretell.bench.schema import FileModel
from foretell.model.kernels.decoder import NativeDecoder
from foretell.roofline.analysis import AnalyzedModel, analyse
from foretell.roofline.calibrate import pass_workload
from foretell.roofline.cost import scalar
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware
from foretell.utils.validation import FrozenModel

_BURST = 3
"""Consecutive passes of a competitor; the first, which finds another's data in the caches, is not counted."""
_ENGINE_STEPS = 4
"""Engine steps that are timed together."""
_MAX_TOKENS_PER_STEP = 12
"""More than prompt lookup decides in a step (10 drafts and a bonus token): timed requests must not end."""
_MAX_OUTSIDE_SHARE = 0.08
"""Goal for the share of an engine step outside the target's pass."""
_MIN_BATCH_GAIN = 5.0
"""Goal for the throughput of plain decoding with `_GOAL_ROWS` rows over that with one."""
_GOAL_ROWS = 16


class PassTiming(FrozenModel):
    """Time of one pass over `tokens` new tokens."""

    competitor: str
    tokens: int
    median_ms: float
    samples_ms: tuple[float, ...]
    """By round."""
    bytes: float | None = None
    """Bytes of weights and cache that the pass must read or write; None: not counted (other runtimes)."""

    @property
    def bytes_per_second(self) -> float | None:
        """Effective bandwidth; None where bytes are not counted."""
        return None if self.bytes is None else self.bytes / (self.median_ms / 1e3)


class RatioGoal(FrozenModel):
    """A measured ratio and the project's goal for it."""

    name: str
    value: float
    goal: float
    is_upper_bound: bool

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal if self.is_upper_bound else self.value >= self.goal


class Throughput(FrozenModel):
    """Tokens per second of plain decoding with `rows` sequences in the batch."""

    competitor: str
    rows: int
    tokens_per_second: float


class StepReport(FileModel):
    """Everything that `foretell bench step` measures."""

    format: str = "foretell step 2"
    model: str
    context: int
    threads: int
    device: str = "cpu"
    bandwidth: float | None = None
    """Bytes per second of reading memory, measured on this device."""
    machine: Mapping[str, str]
    passes: tuple[PassTiming, ...]
    throughput: tuple[Throughput, ...]
    ratio_goals: tuple[RatioGoal, ...]


ProgressCallback = Callable[[str], None]


def time_passes(
    backends: Sequence[ForwardBackend],
    prefix: Sequence[int],
    sizes: Sequence[int],
    repeats: int,
    report: ProgressCallback,
) -> list[PassTiming]:
    """Time passes of every backend over every number of new tokens, interleaved, in `repeats` rounds.

    A first round is not counted.
    """
    for backend in backends:
        backend.prefill(prefix)
    samples: dict[tuple[str, int], list[float]] = {(b.name, n): [] for b in backends for n in sizes}
    for r in range(repeats + 1):
        # The direction alternates, so that a backend does not always follow the same one.
        for backend in backends if r % 2 else list(reversed(backends)):
            for n in sizes:
                tokens = [prefix[i % len(prefix)] for i in range(n)]
                seconds = median([_time_pass(backend, tokens) for _ in range(_BURST)][1:])
                if r:
                    samples[backend.name, n].append(seconds * 1e3)
        report(f"round {r} of {repeats}")
    return [
        PassTiming(competitor=c, tokens=n, median_ms=median(s), samples_ms=tuple(s)) for (c, n), s in samples.items()
    ]


def _time_pass(backend: ForwardBackend, tokens: Sequence[int]) -> float:
    started = time.perf_counter()
    backend.forward(tokens)
    seconds = time.perf_counter() - started
    backend.rollback()
    return seconds


def time_engines(
    models: Sequence[Model], prompt: Sequence[int], rows: Sequence[int], repeats: int, report: ProgressCallback
) -> tuple[dict[tuple[str, int], list[StepTiming]], list[StepTiming]]:
    """Time engine steps, interleaved: of plain decoding by (competitor, rows), and of prompt lookup with one row."""
    max_new_tokens = _MAX_TOKENS_PER_STEP * _ENGINE_STEPS * (repeats + 2)
    plain = {
        (f"foretell {m.precision}", r): EngineTimer(m, "autoregressive", r, prompt, max_new_tokens)
        for m in models
        for r in rows
    }
    lookup = EngineTimer(models[0], "ngram", 1, prompt, max_new_tokens)
    plain_timings: dict[tuple[str, int], list[StepTiming]] = {k: [] for k in plain}
    lookup_timings = []
    for r in range(repeats):
        for key, engine in plain.items():
            plain_timings[key].append(engine.run(_ENGINE_STEPS))
        lookup_timings.append(lookup.run(_ENGINE_STEPS))
        report(f"engine round {r + 1} of {repeats}")
    return plain_timings, lookup_timings


def median_throughput(timings: Mapping[tuple[str, int], Sequence[StepTiming]]) -> list[Throughput]:
    """Median tokens per second by competitor and batch size."""
    return [
        Throughput(competitor=c, rows=r, tokens_per_second=median(t.tokens / t.seconds for t in parts))
        for (c, r), parts in timings.items()
    ]


_BF16, _INT8 = "foretell bfloat16", "foretell int8"
_EAGER, _LLAMA_CPP = "transformers eager bfloat16", "llama.cpp bf16"
_PASS_GOALS = (
    ("pass of 1 token, bfloat16 over transformers eager bfloat16", (_BF16, 1), (_EAGER, 1), 0.40),
    ("pass of 1 token, bfloat16 over llama.cpp bf16", (_BF16, 1), (_LLAMA_CPP, 1), 1.0),
    ("chain of 8 over 1 token, bfloat16", (_BF16, 8), (_BF16, 1), 1.25),
    ("chain of 16 over 1 token, bfloat16", (_BF16, 16), (_BF16, 1), 1.6),
    ("binary tree of 8 over 1 token, bfloat16", (_BF16 + " tree", 8), (_BF16, 1), 1.25),
    ("binary tree of 16 over 1 token, bfloat16", (_BF16 + " tree", 16), (_BF16, 1), 1.6),
    ("pass of 1 token, int8 over bfloat16", (_INT8, 1), (_BF16, 1), 0.7),
    ("chain of 8 over 1 token, int8", (_INT8, 8), (_INT8, 1), 1.4),
)
"""Ratios of two passes, each named by backend and number of new tokens, and their upper bounds."""


def ratio_goals(
    passes: Sequence[PassTiming], throughput: Sequence[Throughput], lookup_timings: Sequence[StepTiming]
) -> list[RatioGoal]:
    """The ratios that the project has goals for, as far as they were measured."""
    samples = {(p.competitor, p.tokens): p.samples_ms for p in passes}
    goals = [
        RatioGoal(
            name=name,
            value=median(a / b for a, b in zip(samples[numerator], samples[denominator], strict=True)),
            goal=goal,
            is_upper_bound=True,
        )
        for name, numerator, denominator, goal in _PASS_GOALS
        if numerator in samples and denominator in samples
    ]
    speeds = {(t.competitor, t.rows): t.tokens_per_second for t in throughput}
    goals += [
        RatioGoal(
            name=f"plain decoding of {_GOAL_ROWS} sequences over 1, tokens/s, {competitor}",
            value=speed / speeds[competitor, 1],
            goal=_MIN_BATCH_GAIN,
            is_upper_bound=False,
        )
        for (competitor, rows), speed in speeds.items()
        if rows == _GOAL_ROWS and (competitor, 1) in speeds
    ]
    if lookup_timings:
        goals.append(
            RatioGoal(
                name="share of a step outside the target pass, prompt lookup, batch 1",
                value=median(1 - t.verify_seconds / t.seconds for t in lookup_timings),
                goal=_MAX_OUTSIDE_SHARE,
                is_upper_bound=True,
            )
        )
    return goals


_BITS = {"float32": "32", "int8": "8"}
"""Formats of precisions other than 16 bits."""
KV_FORMATS = {"int8": "8g64", "fp8": "8g64", "int4": "4g64z", "int4-kivi": "4g32z", "int2-kivi": "2g32z"}
"""Formats of cached keys and values by the dtype of a cache that rounds them."""
_ANY_HARDWARE = Hardware("any", "any", 1.0, {"any": 1.0}, "")
"""Bytes do not depend on the device."""


def pass_bytes(model: Model, tokens: int, context: int) -> float:
    """Bytes of weights and cache that one pass over `tokens` new tokens must move: the packed weights, all else by the
    roofline's count.
    """
    asked = pass_workload(parse_format(_BITS.get(model.precision, "16")), tokens, context)
    if model.config.cache_dtype in KV_FORMATS:
        asked = replace(asked, kv=parse_format(KV_FORMATS[model.config.cache_dtype]))
    total = analyse(AnalyzedModel(model.name, model.config), _ANY_HARDWARE, asked).total
    packed = model.network.packed_bytes if isinstance(model.network, NativeDecoder) else scalar(total.weights)
    return packed + scalar(total.kv_read + total.kv_write)


def add_bytes(passes: Sequence[PassTiming], models: Sequence[Model], context: int) -> list[PassTiming]:
    """The same timings, with `bytes` filled in for our own backends."""
    own = {f"foretell {m.precision}": m for m in models}

    def with_bytes(p: PassTiming) -> PassTiming:
        model = own.get(" ".join(p.competitor.split()[:2]))
        return p if model is None else p.model_copy(update={"bytes": pass_bytes(model, p.tokens, context)})

    return [with_bytes(p) for p in passes]
