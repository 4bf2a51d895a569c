"""Measurements of this machine for `foretell roofline calibrate`: timed passes of the library's own runner, and with
`--methods` times of engine steps outside the target's pass.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from datetime import date

import numpy as np
import torch

from foretell.api import Model
from foretell.bench.competitor import MethodSpec
from foretell.bench.machine import measure_bandwidth, processor_name, synchronize
from foretell.bench.random_model import random_network
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.load import load
from foretell.model.config.model import ModelConfig
from foretell.model.load.native import finish_writing
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.calibrate import PROBES, PassTimer
from foretell.roofline.drafting_time import DraftingSample, at_predicted_pace, fit_drafting_time
from foretell.roofline.formats import NumberFormat
from foretell.roofline.hardware import Hardware
from foretell.roofline.measured import pass_seconds
from foretell.roofline.workload import Workload

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


PROMPT_CHUNK = 256
ESTIMATED = "estimated"
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the largest product that an estimate times."""
PRODUCT_SECONDS = 5e-3
"""A product that takes longer is not followed by a larger one: without units for bfloat16 the largest takes seconds."""
IMPROVEMENT = 0.98
"""A pass counts as faster below this part of the fastest time so far."""
MAX_SECONDS = 2.0
"""Longest measurement of one pass size."""
MAX_CPU_SHARE, MAX_TIME_SPREAD = 0.15, 0.5
"""A machine is busy above this CPU share of other programs, or this relative excess of the median over the fastest
time.
"""


def calibration_source() -> str:
    """The source entry of calibrated figures."""
    return f"foretell roofline calibrate, {date.today().isoformat()}, torch {torch.__version__}"


def interference() -> str | None:
    """A phrase if other programs compete for this machine."""
    used = _cpu_share_in_use()
    if used > MAX_CPU_SHARE:
        return f"other programs use {used:.0%} of the processors"
    block = torch.ones(1 << 22)

    def seconds() -> float:
        start = time.perf_counter()
        block.sum()
        return time.perf_counter() - start

    seconds()
    times = [seconds() for _ in range(100)]
    spread = statistics.median(times) / min(times) - 1
    return f"the same work takes {spread:.0%} longer than at its fastest" if spread > MAX_TIME_SPREAD else None


def _cpu_share_in_use() -> float:
    """CPU share of other programs, while this one sleeps; 0 where the system does not report it."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            each = [int(x) for x in file.readline().split()[1:9]]
        return each[3] + each[4], sum(each)

    try:
        idle, total = ticks()
        time.sleep(0.5)
        idle_then, total_then = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - (idle_then - idle) / max(1, total_then - total)


def device_title(device: torch.device) -> str:
    """Name of the processor with its threads, or of the GPU."""
    return processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


def device_memory(device: torch.device) -> float:
    """Bytes of memory of this machine, or of the GPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def estimated_hardware() -> Hardware:
    """This machine, or its GPU, by its memory's bandwidth and one matrix product by format: measured in about a second.
    `foretell roofline calibrate` measures passes instead.
    """
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = {"fp32": _product_rate(torch.float32, where), "fp16": _product_rate(torch.bfloat16, where)}
    # Foretell converts 16-bit operands where products of them are slower.
    rates["fp16"] = max(rates.values())
    source = "estimated from the bandwidth and a matrix product"
    return Hardware(
        ESTIMATED,
        device_title(where),
        measure_bandwidth(where),
        rates,
        source,
        device_memory(where),
        kind="gpu" if where.type == "cuda" else "other",
    )


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """OPs/s of square matrix products: the fastest of the largest size."""

    def seconds(size: int) -> float:
        a = torch.ones(size, size, dtype=dtype, device=device)
        a @ a
        times = []
        for _ in range(5):
            synchronize(device)
            start = time.perf_counter()
            a @ a
            synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    size = 128
    while (took := seconds(size)) < PRODUCT_SECONDS and size < PRODUCT_SIZE[device.type]:
        size *= 2
    return float(2 * size**3 / took)


def probe_timers(precision: str, repeat: int, device: torch.device) -> Iterator[tuple[ModelConfig, PassTimer]]:
    """The probe models with random weights and their timers, one in memory at a time."""
    for config in PROBES:
        network = random_network(config, precision, device)  # type: ignore[arg-type]
        yield config, pass_timer(network, repeat)


def embedded_timer(precision: str, repeat: int, device: torch.device) -> tuple[PassTimer, ModelConfig]:
    """The timer of the embedded model, and its configuration."""
    model = load(DEFAULT_MODEL, dtype=precision, device=str(device))
    finish_writing()
    return pass_timer(model.network, repeat), model.config


def calibrate_drafting(
    forms: Mapping[str, NumberFormat], methods: Sequence[MethodSpec], hardware: Hardware
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Figures of each method's `DraftingTime` with the embedded model, by its name with the dtype, relative to the
    passes that `hardware` predicts. forms: number formats by dtype.

    Raises:
        ValueError: a method cannot be built for it.
    """
    if not methods:
        return {}
    figures = dict[str, dict[str, tuple[float, ...]]]()
    for precision, form in forms.items():
        model = load(DEFAULT_MODEL, dtype=precision)
        model.cache_checkpoint()
        finish_writing()
        target, workload = (
            AnalyzedModel(model.name, model.config),
            Workload(weights=form, activations=form, fusion="full"),
        )

        def predicted(sample: DraftingSample, target: AnalyzedModel = target, workload: Workload = workload) -> float:
            there = replace(workload, context=sample.context)
            return pass_seconds(target, hardware, there, sample.requests, sample.read / sample.requests)

        fits = {
            m.label: fit_drafting_time(at_predicted_pace(list(drafting_samples(model, m)), predicted)) for m in methods
        }
        figures[f"{model.name} {precision}"] = {name: astuple(fit) for name, fit in fits.items()}
    return figures


def pass_timer(network: Network, repeat: int) -> PassTimer:
    """A timer of passes with all logits: the median of `repeat` passes, once as many were not faster than before."""
    runner = DecoderRunner(network)

    def measure(tokens: int, context: int) -> float:
        runner.truncate(0, context)
        while runner.length(0) < context:
            piece = chain(min(PROMPT_CHUNK, context - runner.length(0)))
            runner.forward([0], piece, scored=np.zeros((1, piece.nodes), bool))
            runner.commit(0, list(range(piece.nodes)))
        synchronize(network.device)
        tree, best, since, times = chain(tokens), float("inf"), 0, list[float]()
        until = time.perf_counter() + MAX_SECONDS
        while since < repeat and (start := time.perf_counter()) < until:
            runner.forward([0], tree)
            synchronize(network.device)
            took = time.perf_counter() - start
            since = 0 if took < IMPROVEMENT * best else since + 1
            best = min(best, took)
            times.append(took)
        return statistics.median(times[-repeat:])

    return measure


def chain(tokens: int) -> TokenTree:
    """A chain of equal tokens."""
    return tree_from_lists([[1] * tokens], [list(range(-1, tokens - 1))])
