"""Requests that arrive over time at a server with continuous batching: latencies and throughput, simulated.

Each step is one pass over all running requests and, within a budget of tokens, the next piece of a waiting prompt
(chunked prefill, arXiv 2308.16369); where the runtime reads prompts first, whole prompts have passes of their own.
A running request gains one token a step, or with drafts as many as are accepted.
"""

import csv
import io
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cost import device_rates, op_costs, total_cost
from foretell.roofline.drafter_cost import DrafterCost
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import Array
from foretell.roofline.method_profiles import MethodProfile, cost_of_profile
from foretell.roofline.plan import profiles_for
from foretell.roofline.speculation import DraftShape, estimate_method
from foretell.roofline.workload import Phase, SequenceGroup, Workload

CONTEXT_STEP = 128
"""Mean contexts are rounded to this many tokens, so that pass times can be kept."""
_RUNNING_AT_ONCE, _CONTEXTS_AT_ONCE = 32, 8
"""Steps of neighbouring sizes are evaluated together, as arrays."""
TRACE_COLUMNS = ("arrival", "prompt", "output")


@dataclass(frozen=True)
class Request:
    """A request: its arrival in seconds, and the tokens of its prompt and its output. tpot: seconds per further token
    within which it counts for the goodput; None: the limit of the simulation.
    """

    arrival: float
    prompt: int
    output: int
    tpot: float | None = None


def poisson_requests(rate: float, count: int, prompt: int, output: int, seed: int = 0) -> list[Request]:
    """`count` requests with exponential gaps, `rate` a second on average, and random outputs of mean length `output`.

    Raises:
        ValueError: a figure is not positive.
    """
    for name, value in (("rate", rate), ("number of requests", count), ("prompt", prompt), ("output", output)):
        if not value > 0 or not math.isfinite(value):
            raise ValueError(f"the {name} must be a positive number, found {value:g}")
    draw, at, requests = random.Random(seed), 0.0, list[Request]()
    for _ in range(count):
        at += draw.expovariate(rate)
        requests.append(Request(at, prompt, 1 + int(draw.expovariate(1 / output))))
    return requests


def read_trace(path: Path) -> list[Request]:
    """Requests from a CSV file with the columns arrival (seconds), prompt and output (tokens), and if it has one, tpot
    (seconds per further token within which the request counts for the goodput).

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
    requests = list[Request]()
    for row in rows:
        place = f"{path}, line {rows.line_num}"
        arrival, prompt, output = (_trace_number(row, name, place) for name in TRACE_COLUMNS)
        tpot = _trace_number(row, "tpot", place) if "tpot" in row else None
        requests.append(Request(arrival, int(prompt), int(output), tpot))
    if not requests:
        raise ValueError(f"{path} holds no request")
    return sorted(requests, key=lambda r: r.arrival)


def _trace_number(row: Mapping[str, str | None], name: str, place: str) -> float:
    """The figure of a column; an error names the place."""
    text, least = row[name], 1 if name in ("prompt", "output") else 0
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ValueError(f"{place}: {name} must be a number from {least}, found {text!r}")
    return number


@dataclass
class StepCosts:
    """Times of steps of a server, kept by size.

    shape, drafter: what is drafted for every running request and by what; no shape: plain decoding. draft_devices: that
    share the drafter; None: all of the workload.
    """

    model: AnalyzedModel
    hardware: Hardware
    workload: Workload
    shape: DraftShape | None = None
    drafter: DrafterCost | None = None
    draft_devices: int | None = None
    _kept: dict[tuple[int, int, int, int], Array] = field(default_factory=dict)

    def seconds(self, running: int, context: int, prompt: int, prompts: int = 1) -> float:
        """A step over `running` requests of that mean context and `prompts` pieces of `prompt` tokens of a prompt."""
        block, row = divmod(running, _RUNNING_AT_ONCE)
        contexts, column = divmod(-(-context // CONTEXT_STEP), _CONTEXTS_AT_ONCE)
        key = block, contexts, prompt, prompts
        if key not in self._kept:
            self._kept[key] = self._steps(*key)
        return float(self._kept[key][row, column])

    def _steps(self, block: int, contexts: int, prompt: int, prompts: int) -> Array:
        """Steps over neighbouring numbers of running requests and contexts, [_RUNNING_AT_ONCE, _CONTEXTS_AT_ONCE]."""
        sizes = block * _RUNNING_AT_ONCE + np.arange(float(_RUNNING_AT_ONCE))
        steps = contexts * _CONTEXTS_AT_ONCE + np.arange(float(_CONTEXTS_AT_ONCE))
        running, context = (a.reshape(-1, 1) for a in np.meshgrid(sizes, CONTEXT_STEP * steps, indexing="ij"))
        nodes = self.shape.nodes if self.shape else 1
        took = self._pass(self.model, self.workload, running, nodes, context, prompt, prompts)
        if self.shape is not None:
            took = took + np.where(running[:, 0] > 0, self._drafting(self.shape, running, context), 0.0)
        return took.reshape(_RUNNING_AT_ONCE, _CONTEXTS_AT_ONCE)

    def _drafting(self, shape: DraftShape, running: Array, context: Array) -> Array:
        took = self.hardware.runtime.step_seconds(running[:, 0], self.drafter is None)
        if self.drafter is None:
            return took
        formats = replace(
            self.workload,
            weights=self.drafter.weights or self.workload.weights,
            kv=self.drafter.kv or self.workload.kv,
            devices=self.workload.devices if self.draft_devices is None else self.draft_devices,
        )
        widths = shape.widths if self.drafter.per == "level" else (1,)
        passes = {width: self._pass(self.drafter, formats, running, width, context) for width in set(widths)}
        for width in widths:
            took = took + passes[width]
        return took

    def _pass(
        self,
        of: AnalyzedModel | DrafterCost,
        workload: Workload,
        running: Array,
        tokens: int,
        context: Array,
        prompt: int = 0,
        prompts: int = 0,
    ) -> Array:
        """Seconds of passes over `running` sequences of a `context` each, both [steps, 1]."""
        graph = of.graph if isinstance(of, DrafterCost) else of.graph(workload.fusion, False, workload.square)
        sequences, width = (running * tokens, 1) if self.hardware.runtime.expansion else (running, tokens)
        groups = [SequenceGroup(sequences, float(width), context)]
        groups += [SequenceGroup(float(prompts), float(prompt), 0.0)] if prompt else []
        rows = running * tokens + (prompts if prompt else 0)
        phase = Phase(tuple(groups), rows, 1.0, False)
        seconds = total_cost(op_costs(graph, phase, device_rates(workload, self.hardware))).seconds
        return np.broadcast_to(np.asarray(seconds), (len(running),))


def load_costs(
    profile: MethodProfile,
    target: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    shape: DraftShape,
    draft_model: AnalyzedModel | None = None,
    draft_devices: int | None = None,
) -> tuple[StepCosts, StepCosts]:
    """Steps of a server without drafts, and with those of a method in a given shape at the workload's context.

    Raises:
        ValueError: the method cannot be used, or cannot draft the shape.
    """
    (fitting,) = profiles_for(target, {profile.name: profile}, draft_model).values()
    drafter = cost_of_profile(fitting, target, draft_model)
    yielding = estimate_method(fitting, drafter, target, hardware, workload, shape=shape).shape
    return (
        StepCosts(target, hardware, workload),
        StepCosts(target, hardware, workload, yielding, drafter, draft_devices),
    )


@dataclass(frozen=True)
class LoadResult:
    """What requests saw, in seconds. percentiles: time to the first token, per further token, and of the whole answer,
    at 50 and 99 %. goodput: requests a second within the limits; good_tokens: their tokens a second.
    """

    rate: float
    percentiles: dict[str, tuple[float, float]]
    mean_latency: float
    tokens_per_second: float
    goodput: float
    mean_running: float
    good_tokens: float = 0.0


@dataclass
class _Running:
    request: Request
    left: float
    first: float = 0.0


@dataclass
class _Server:
    """A server between two steps. done: requests with the times of their first and their last token."""

    costs: StepCosts
    waiting: deque[Request]
    max_running: int
    prompt_tokens: int
    draw: random.Random
    running: list[_Running] = field(default_factory=list)
    done: list[tuple[Request, float, float]] = field(default_factory=list)
    now: float = 0.0
    prompt_left: int = 0
    busy: float = 0.0
    running_seconds: float = 0.0

    def step(self) -> None:
        """One pass: prompts, and a token or the accepted drafts for the running requests."""
        if not self.running and self.waiting[0].arrival > self.now:
            self.now = self.waiting[0].arrival
        first = self.costs.hardware.runtime.prefill_first
        prompts, tokens = self._whole_prompts() if first else self._piece()
        decoding = [] if first and prompts else self.running
        context = sum(r.request.prompt + r.request.output - r.left for r in decoding) / max(1, len(decoding))
        took = self.costs.seconds(len(decoding), int(context), tokens, prompts)
        self.now, self.busy = self.now + took, self.busy + took
        self.running_seconds += len(self.running) * took
        tau = (self.costs.shape.tokens or 1.0) if self.costs.shape else 1.0
        for each in decoding:
            each.left -= math.floor(tau) + (self.draw.random() < tau - math.floor(tau))
        if not first and prompts:
            self.prompt_left -= tokens
            prompts = not self.prompt_left
        for _ in range(prompts):
            request = self.waiting.popleft()
            self.running.append(_Running(request, request.output - 1.0, self.now))
        self.done += [(r.request, r.first, self.now) for r in self.running if r.left <= 0]
        self.running = [r for r in self.running if r.left > 0]

    def _arrived(self, at: int) -> bool:
        """Whether the waiting request `at` that place has arrived and has room."""
        room = len(self.running) + at < self.max_running
        return room and at < len(self.waiting) and self.waiting[at].arrival <= self.now

    def _piece(self) -> tuple[int, int]:
        """The next piece of the first waiting prompt: pieces and their tokens."""
        if not self._arrived(0):
            return 0, 0
        self.prompt_left = self.prompt_left or self.waiting[0].prompt
        return 1, min(self.prompt_left, self.prompt_tokens)

    def _whole_prompts(self) -> tuple[int, int]:
        """The waiting prompts that fit into a pass, at least one: their number and mean tokens."""
        count = total = 0
        while self._arrived(count) and (not count or total + self.waiting[count].prompt <= self.prompt_tokens):
            total += self.waiting[count].prompt
            count += 1
        return count, -(-total // max(1, count))


def simulate(
    requests: Sequence[Request],
    costs: StepCosts,
    max_running: int = 256,
    prompt_tokens: int = 2048,
    ttft_limit: float = 1.0,
    tpot_limit: float = 0.05,
    seed: int = 0,
    finished: Callable[[int], None] | None = None,
) -> LoadResult:
    """Serve the requests in order of arrival.

    max_running: requests in a pass. prompt_tokens: of prompts in a pass. ttft_limit, tpot_limit: seconds to the first
    token and per further token within which a request counts for the goodput. finished: called after each step with the
    number of requests that have been answered.

    Raises:
        ValueError: nothing can run, or no request is given.
    """
    if max_running < 1 or prompt_tokens < 1:
        raise ValueError("a server needs room for at least one request and one token of a prompt")
    if not requests:
        raise ValueError("no request was given")
    waiting = deque(sorted(requests, key=lambda r: r.arrival))
    server = _Server(costs, waiting, max_running, prompt_tokens, random.Random(seed))
    while server.waiting or server.running:
        server.step()
        if finished is not None:
            finished(len(server.done))
    return _load_result(server, ttft_limit, tpot_limit)


def _load_result(server: _Server, ttft_limit: float, tpot_limit: float) -> LoadResult:
    """The result of a server that is done."""
    served = [r for r, _, _ in server.done]
    first, whole, per_token = (
        np.array(times)
        for times in zip(
            *((s - r.arrival, e - r.arrival, (e - s) / max(1, r.output - 1)) for r, s, e in server.done), strict=True
        )
    )
    limits = np.array([tpot_limit if r.tpot is None else r.tpot for r in served])
    within = (first <= ttft_limit) & (per_token <= limits)
    outputs, arrivals = np.array([r.output for r in served]), [r.arrival for r in served]
    span, last = server.now - min(arrivals), max(arrivals) - min(arrivals)

    def both(times: Array) -> tuple[float, float]:
        return float(np.quantile(times, 0.5)), float(np.quantile(times, 0.99))

    return LoadResult(
        (len(served) - 1) / last if last else math.inf,
        {"ttft": both(first), "tpot": both(per_token), "latency": both(whole)},
        float(whole.mean()),
        float(outputs.sum()) / span,
        int(within.sum()) / span,
        server.running_seconds / server.busy,
        float(outputs[within].sum()) / span,
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


def drafts_text(method: str, drafted: StepCosts) -> str:
    """What is drafted, in words."""
    if drafted.shape is None:
        return f"{method}, nothing drafted"
    return f"{method}, {drafted.shape.nodes - 1} drafted, {drafted.shape.tokens or 1.0:.2f} tokens per pass"


def advice(comparisons: Sequence[LoadComparison]) -> str:
    """One sentence: up to which of the simulated rates drafts shorten the answers."""
    if not (helped := [c.plain.rate for c in comparisons if c.speedup > 1]):
        return "Do not speculate: at every rate answers take longer with drafts."
    if len(helped) == len(comparisons):
        return (
            f"Speculate: answers take less time at every rate, {min(helped):.3g} to {max(helped):.3g} requests a "
            "second."
        )
    return f"Speculate up to {max(helped):.3g} requests a second; at higher rates answers take longer with drafts."
