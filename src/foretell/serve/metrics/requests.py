"""Metrics of the engine's requests, under vLLM's names where it has one.

Times are those of the engine's thread, by the monotonic clock.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge

from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update
from foretell.serve.jobs import Job
from foretell.serve.metrics.histogram import FastHistogram, Series
from foretell.serve.metrics.registry import MetricTables

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
               20, 40, 80)  # fmt: skip
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50)
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20, 50)
FINISH_REASONS = {
    "stop": "stop", "length": "length", "repetition": "repetition", "cancelled": "abort", "error": "error",
}  # fmt: skip
"""vLLM's names by the engine's."""
ENGINE = "0"
"""vLLM's label of an engine; there is one."""


@dataclass
class _Live:
    """A request that is not over."""

    request: Request
    method: str
    opened: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class RequestMetrics:
    """Observes requests. `method_of`: name of the method that decodes a request."""

    def __init__(self, tables: MetricTables, labels: tuple[str, str], method_of: Callable[[Request], str]) -> None:
        self._tables, self._labels, self._method_of = tables, labels, method_of
        self._live = dict[int, _Live]()
        self._define_request_metrics()
        self._define_speculation_metrics()

    def _counter(self, name: str, text: str, *labels: str, own: bool = False) -> Counter:
        registry = self._tables.own if own else self._tables.shared
        return Counter(name, text, ("model_name", "engine", *labels), registry=registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Series:
        return FastHistogram(name, text, ("model_name", "engine"), self._tables.shared, buckets).labels(*self._labels)

    def _define_request_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.").labels(*self._labels)
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.").labels(*self._labels)
        self._new_tokens = self._counter("generation_tokens", "New tokens.").labels(*self._labels)
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the cache.").labels(*self._labels)
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the cache.").labels(*self._labels)
        self._finished = self._counter("request_success", "Requests that are over.", "finished_reason")
        self._preemptions = self._counter("num_preemptions", "Requests preempted.").labels(*self._labels)
        self._restarts = self._counter("engine_restarts", "Crashes of the engine.", own=True).labels(*self._labels)
        seconds, tokens = LATENCY_BUCKETS, TOKEN_BUCKETS
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between passes that gave tokens.", ITL_BUCKETS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", ITL_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time of a whole request.", seconds)
        self._queue = self._histogram("request_queue_time_seconds", "Time until a request runs.", seconds)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time to read a prompt.", seconds)
        self._decode = self._histogram("request_decode_time_seconds", "Time after the first token.", seconds)
        self._inference = self._histogram("request_inference_time_seconds", "Time in which a request runs.", seconds)
        self._lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._answers = self._histogram("request_generation_tokens", "New tokens of a request.", tokens)
        self._wanted = self._histogram("request_params_max_tokens", "Most new tokens of a request.", tokens)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "New tokens of the longest choice of a prompt.", tokens
        )
        self._choices = self._histogram("request_params_n", "Choices of a prompt.", CHOICE_BUCKETS)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS
        )

    def _define_speculation_metrics(self) -> None:
        name = "spec_decode_num"
        self._drafts = self._counter(f"{name}_drafts", "Passes with drafts.", "method")
        self._draft_tokens = self._counter(f"{name}_draft_tokens", "Drafted tokens.", "method")
        self._accepted = self._counter(f"{name}_accepted_tokens", "Accepted drafts.", "method")
        self._by_position = self._counter(
            f"{name}_accepted_tokens_per_pos", "Accepted drafts by depth.", "method", "position"
        )
        self._verified = self._counter("spec_nodes_verified", "Drafts verified.", own=True).labels(*self._labels)
        self._wasted = self._counter("spec_nodes_wasted", "Drafts refused.", own=True).labels(*self._labels)
        undrafted = self._counter("spec_undrafted_requests", "Requests decoded without drafts.", "reason", own=True)
        self._undrafted = undrafted.labels(*self._labels, "asked")

    def show_engine(
        self, engine: Callable[[], Engine | None], live: Callable[[], int], paused: Callable[[], int]
    ) -> None:
        """Expose the state of an engine as gauges; `live`: number of requests that are not over, `paused`: of those
        that wait for a slow reader.
        """

        def of(read: Callable[[Engine], float]) -> Callable[[], float]:
            return lambda: 0.0 if (current := engine()) is None else read(current)

        running = of(lambda e: e.load[0])
        shared, own = self._tables.shared, self._tables.own
        for registry, name, text, value in (
            (shared, "num_requests_running", "Requests in the batch.", running),
            (shared, "num_requests_waiting", "Requests that wait.", lambda: max(live() - running(), 0)),
            (shared, "kv_cache_usage_perc", "Share of the cache that running requests fill; 1: all of it.",
             of(lambda e: e.cache_usage)),
            (own, "kv_cache_unowned_rows", "Rows of the cache that hold tokens of no request; must be 0.",
             of(lambda e: e.unowned_rows)),
            (own, "kv_cache_bytes", "Memory of the cache of keys and values.", of(lambda e: e.cache_bytes)),
        ):  # fmt: skip
            Gauge(name, text, ("model_name", "engine"), registry=registry).labels(*self._labels).set_function(value)
        by_reason = Gauge(
            "num_requests_waiting_by_reason", "Requests that wait for a place or for their reader.",
            ("model_name", "engine", "reason"), registry=shared,
        )  # fmt: skip
        by_reason.labels(*self._labels, "capacity").set_function(lambda: max(live() - running() - paused(), 0))
        by_reason.labels(*self._labels, "reader").set_function(paused)

    def engine_failed(self) -> None:
        """The engine has crashed, and is built again."""
        self._restarts.inc()

    def closed(self, job: Job) -> None:
        """Nobody reads a job any more."""
        for first in range(0, len(job.sizes), job.per_prompt):
            self._choices.observe(job.per_prompt)
            self._longest.observe(max(job.sizes[first : first + job.per_prompt]))

    def opened(self, ticket: int, request: Request) -> None:
        """A request was given to the engine."""
        self._live[ticket] = _Live(request, self._method_of(request))

    def updated(self, ticket: int, at: float, update: Update) -> None:
        """A request has got something."""
        live = self._live[ticket]
        if update.tokens:
            self._count_tokens(live, at, update)
        if update.finish_reason is not None:
            self._finish(self._live.pop(ticket), at, update)

    def lost(self, ticket: int) -> None:
        """A request has ended with its engine, or was refused by it."""
        if self._live.pop(ticket, None) is not None:
            self._finished.labels(*self._labels, "error").inc()

    def _count_tokens(self, live: _Live, at: float, update: Update) -> None:
        if live.tokens:
            self._itl.observe(at - live.last)
        else:
            live.first = at
            self._ttft.observe(at - live.opened)
            self._prompt_tokens.inc(len(live.request.prompt))
        live.last, live.tokens = at, live.tokens + len(update.tokens)
        self._new_tokens.inc(len(update.tokens))
        if update.drafted:
            self._count_drafts((*self._labels, live.method), update)

    def _count_drafts(self, labels: tuple[str, ...], update: Update) -> None:
        self._drafts.labels(*labels).inc()
        self._draft_tokens.labels(*labels).inc(update.drafted)
        self._accepted.labels(*labels).inc(update.accepted)
        for position in range(update.accepted):
            self._by_position.labels(*labels, str(position)).inc()
        self._verified.inc(update.drafted)
        self._wasted.inc(update.drafted - update.accepted)

    def _finish(self, live: _Live, at: float, update: Update) -> None:
        self._finished.labels(*self._labels, FINISH_REASONS[update.finish_reason or "error"]).inc()
        statistics = update.statistics
        if statistics is None or not live.tokens:
            return
        prompt, queued = len(live.request.prompt), statistics.queue_seconds
        self._queries.inc(prompt)
        self._hits.inc(statistics.cached_tokens)
        self._cached.inc(statistics.cached_tokens)
        self._preemptions.inc(statistics.preemptions)
        self._request_preemptions.observe(statistics.preemptions)
        if live.request.max_drafts == 0:
            self._undrafted.inc()
        self._e2e.observe(at - live.opened)
        self._queue.observe(queued)
        self._prefill.observe(max(live.first - live.opened - queued, 0.0))
        self._decode.observe(live.last - live.first)
        self._inference.observe(max(live.last - live.opened - queued, 0.0))
        if live.tokens > 1:
            self._tpot.observe((live.last - live.first) / (live.tokens - 1))
        self._lengths.observe(prompt)
        self._answers.observe(live.tokens)
        self._wanted.observe(live.request.max_new_tokens)
