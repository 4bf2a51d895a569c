"""Requests that arrive over time at a server with continuous batching: latencies and throughput, simulated.

Each step is one pass over all running requests and, within a budget of tokens, the next piece of a waiting prompt
(chunked prefill, arXiv 2308.16369). A running request gains one token a step, or with drafts as many as are accepted.
"""

import csv
import io
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cost import device_rates, op_costs, scalar, total_cost
from foretell.roofline.drafter_cost import DrafterCost
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import Array
from foretell.roofline.speculation import DraftShape
from foretell.roofline.workload import Phase, SequenceGroup, Workload

CONTEXT_STEP = 128
"""Mean contexts are rounded to this many tokens, so that pass times can be kept."""
TRACE_COLUMNS = ("arrival", "prompt", "output")


@dataclass(frozen=True)
class Request:
    """A request: its arrival in seconds, and the tokens of its prompt and its output."""

    arrival: float
    prompt: int
    output: int


def poisson_requests(rate: float, count: int, prompt: int, output: int, seed: int = 0) -> list[Request]:
    """`count` requests with exponential gaps, `rate` a second on average, and random outputs of mean length `output`.

    Raises:
        ValueError: a figure is not positive.
    """
    for name, value in (("rate", rate), ("number of requests", count), ("prompt", prompt), ("output", output)):
        if not value > 0 or not math.isfinite(value):
            raise ValueError(f"the {name} must be a positive number, found {value:g}")
    draw, at, found = random.Random(seed), 0.0, list[Request]()
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(Request(at, prompt, 1 + int(draw.expovariate(1 / output))))
    return found


def read_trace(path: Path) -> list[Request]:
    """Requests from a CSV file with the columns arrival (seconds), prompt and output (tokens).

    Raises:
        ValueError: no such file, a missing column, or a value that is no number; the line and the column are named.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trace {path}: {error}") from None
    rows = csv.DictReader(io.StringIO(text))
    missing = [name for name in TRACE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"{path}, line 1: a trace has the columns {', '.join(TRACE_COLUMNS)}; {missing[0]} is missing")
    found = list[Request]()
    for row in rows:
        numbers = list[float]()
        for name in TRACE_COLUMNS:
            least = 0 if name == "arrival" else 1
            try:
                numbers.append(float(row[name]))
            except (TypeError, ValueError):
                numbers.append(math.nan)
            if not least <= numbers[-1] < math.inf:
                raise ValueError(
                    f"{path}, line {rows.line_num}: {name} must be a number from {least}, found {row[name]!r}"
                )
        found.append(Request(numbers[0], int(numbers[1]), int(numbers[2])))
    if not found:
        raise ValueError(f"{path} holds no request")
    return sorted(found, key=lambda r: r.arrival)


@dataclass
class StepCosts:
    """Times of steps of a server, kept by size.

    shape, drafter: what is drafted for every running request and by what; no shape: plain decoding.
    """

    model: AnalyzedModel
    hardware: Hardware
    workload: Workload
    shape: DraftShape | None = None
    drafter: DrafterCost | None = None
    _kept: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def seconds(self, running: int, context: int, prompt: int) -> float:
        """A step over `running` requests of that mean context and `prompt` tokens of a prompt."""
        key = (running, -(-context // CONTEXT_STEP) * CONTEXT_STEP, prompt)
        if key not in self._kept:
            self._kept[key] = self._step(*key)
        return self._kept[key]

    def _step(self, running: int, context: int, prompt: int) -> float:
        nodes = self.shape.nodes if self.shape else 1
        took = self._pass(self.model, self.workload, running, nodes, context, prompt)
        if self.shape is None or not running:
            return took
        took += self.hardware.runtime.step_overhead
        if self.drafter is None:
            return took
        formats = replace(
            self.workload,
            weights=self.drafter.weights or self.workload.weights,
            kv=self.drafter.kv or self.workload.kv,
        )
        widths = self.shape.widths if self.drafter.per == "level" else (1,)
        return took + sum(self._pass(self.drafter, formats, running, width, context, 0) for width in widths)

    def _pass(
        self,
        of: AnalyzedModel | DrafterCost,
        workload: Workload,
        running: int,
        tokens: int,
        context: int,
        prompt: int,
    ) -> float:
        graph = of.graph if isinstance(of, DrafterCost) else of.graph(workload.fusion, False, workload.square)
        sequences, width = (running * tokens, 1) if self.hardware.runtime.expansion else (running, tokens)
        groups = [SequenceGroup(np.array([float(sequences)]), float(width), float(context))]
        groups += [SequenceGroup(1.0, float(prompt), 0.0)] if prompt else []
        rows = np.array([float(running * tokens + bool(prompt))])
        phase = Phase(tuple(groups), rows, 1.0, False)
        return scalar(total_cost(op_costs(graph, phase, device_rates(workload, self.hardware))).seconds)


@dataclass(frozen=True)
class LoadResult:
    """What requests saw, in seconds. percentiles: time to the first token, per further token, and of the whole answer,
    at 50 and 99 %. goodput: requests a second within the limits.
    """

    rate: float
    percentiles: dict[str, tuple[float, float]]
    mean_latency: float
    tokens_per_second: float
    goodput: float
    mean_running: float


@dataclass
class _Running:
    request: Request
    left: float
    first: float = 0.0


def simulate(
    requests: Sequence[Request],
    costs: StepCosts,
    max_running: int = 256,
    prompt_tokens: int = 2048,
    ttft_limit: float = 1.0,
    tpot_limit: float = 0.05,
    seed: int = 0,
) -> LoadResult:
    """Serve the requests in order of arrival.

    max_running: requests in a pass. prompt_tokens: of prompts in a pass. ttft_limit, tpot_limit: seconds to the first
    token and per further token within which a request counts for the goodput.

    Raises:
        ValueError: nothing can run, or no request is given.
    """
    if max_running < 1 or prompt_tokens < 1:
        raise ValueError("a server needs room for at least one request and one token of a prompt")
    if not requests:
        raise ValueError("no request was given")
    draw, waiting, running = random.Random(seed), deque(sorted(requests, key=lambda r: r.arrival)), list[_Running]()
    tau = (costs.shape.tokens or 1.0) if costs.shape else 1.0
    now, prompt_left, steps_running, busy = 0.0, 0, 0.0, 0.0
    done = list[tuple[Request, float, float]]()
    while waiting or running:
        if not running and waiting[0].arrival > now:
            now = waiting[0].arrival
        arrived = bool(waiting) and waiting[0].arrival <= now and len(running) < max_running
        piece = 0
        if arrived:
            prompt_left = prompt_left or waiting[0].prompt
            piece = min(prompt_left, prompt_tokens)
        context = sum(r.request.prompt + r.request.output - r.left for r in running) / len(running) if running else 0
        took = costs.seconds(len(running), int(context), piece)
        now, steps_running, busy = now + took, steps_running + len(running) * took, busy + took
        for each in running:
            each.left -= math.floor(tau) + (draw.random() < tau - math.floor(tau))
        if arrived:
            prompt_left -= piece
            if not prompt_left:
                request = waiting.popleft()
                running.append(_Running(request, request.output - 1.0, now))
        done += [(r.request, r.first, now) for r in running if r.left <= 0]
        running = [r for r in running if r.left > 0]
    first = np.array([start - r.arrival for r, start, _ in done])
    per_token = np.array([(end - start) / max(1, r.output - 1) for r, start, end in done])
    whole = np.array([end - r.arrival for r, _, end in done])
    span = now - min(r.arrival for r, _, _ in done)
    within = int(((first <= ttft_limit) & (per_token <= tpot_limit)).sum())

    def both(times: Array) -> tuple[float, float]:
        return float(np.quantile(times, 0.5)), float(np.quantile(times, 0.99))

    last = max(r.arrival for r in requests) - min(r.arrival for r in requests)
    return LoadResult(
        (len(requests) - 1) / last if last else math.inf,
        {"ttft": both(first), "tpot": both(per_token), "latency": both(whole)},
        float(whole.mean()),
        sum(r.output for r, _, _ in done) / span,
        within / span,
        steps_running / busy,
    )


@dataclass(frozen=True)
class LoadComparison:
    """The same requests without and with drafts."""

    plain: LoadResult
    drafted: LoadResult

    @property
    def speedup(self) -> float:
        """Mean time of an answer without drafts over that with them."""
        return self.plain.mean_latency / self.drafted.mean_latency


def advice(comparisons: Sequence[LoadComparison]) -> str:
    """One sentence: up to which of the simulated rates drafts shorten the answers."""
    if not (helped := [c.plain.rate for c in comparisons if c.speedup > 1]):
        return "Do not speculate: at every rate answers take longer with drafts."
    if len(helped) == len(comparisons):
        return (
            f"Speculate: answers are shorter at every rate, {min(helped):.3g} to {max(helped):.3g} requests a second."
        )
    return f"Speculate up to {max(helped):.3g} requests a second; at higher rates answers take longer with drafts."
