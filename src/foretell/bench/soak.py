"""A soak test: mixed load on a server for a long time, while its memory, files, rows and errors are watched."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from foretell.bench.server_metrics import Snapshot, metrics_address, read_metrics
from foretell.bench.soak_client import BusyError, KnownAnswers, SoakClient, SoakError, SoakTarget
from foretell.bench.soak_load import act
from foretell.bench.text_table import Cell, TextTable

FILES_SLACK = 8
"""Open files more than at the start that are no leak."""
_MB = 1e6
_SHOWN_ROWS = 20
_BUSY_PAUSE = 0.2
"""Seconds that a client waits after it was refused because of load."""


@dataclass(frozen=True)
class SoakPlan:
    """How long, and how much."""

    seconds: float
    clients: int = 8
    samples: int = 60
    max_growth: float = 0.02
    """Greatest growth of the memory without the cache, from after the first third on."""


@dataclass(frozen=True)
class SoakSample:
    """The state of the server after some seconds of load."""

    seconds: float
    requests: int
    resident: float
    """Bytes of memory."""
    cache: float
    """Bytes of keys and values among them."""
    files: float
    running: float
    waiting: float
    unowned_rows: float

    @property
    def rest(self) -> float:
        """Memory without the cache, which grows until it is full."""
        return self.resident - self.cache

    @staticmethod
    def of(metrics: Snapshot, seconds: float, requests: int) -> "SoakSample":
        """From the server's metrics."""
        return SoakSample(
            seconds,
            requests,
            metrics.total("process_resident_memory_bytes"),
            metrics.total("kv_cache_bytes"),
            metrics.total("process_open_fds"),
            metrics.total("num_requests_running"),
            metrics.total("num_requests_waiting"),
            metrics.total("kv_cache_unowned_rows"),
        )


@dataclass
class SoakReport:
    """What happened."""

    plan: SoakPlan
    done: Counter[str] = field(default_factory=Counter)
    """What clients did, by kind."""
    refused: int = 0
    """Requests that the server refused because of load."""
    errors: list[str] = field(default_factory=list)
    differences: Sequence[str] = ()
    """Answers that were not those of the first time, with what differed."""
    restarts: float = 0.0
    """Crashes of the engine."""
    engine_errors: float = 0.0
    """Requests that ended with an error in the engine, by the server's own count."""
    samples: list[SoakSample] = field(default_factory=list)
    last: SoakSample | None = None
    """After the load, when the server is idle."""

    @property
    def growth(self) -> float:
        """Growth of the memory without the cache: the median of the last sixth of the samples over that of the second
        third's first half.
        """
        values = [s.rest for s in self.samples]
        count = len(values)
        early, late = values[count // 3 : count // 2], values[-max(count // 6, 1) :]
        return median(late) / median(early) - 1 if early and median(early) > 0 else 0.0

    def problems(self) -> list[str]:
        """Why the server has failed; empty: it has not."""
        last, reasons = self.last, list[str]()
        if self.errors:
            kinds = Counter(error.partition(":")[0] for error in self.errors)
            counts = ", ".join(f"{n} in {kind}" for kind, n in kinds.items())
            reasons.append(f"{len(self.errors)} errors ({counts}); the first: {self.errors[0]}")
        if self.differences:
            reasons.append(
                f"{len(self.differences)} answers differ from the first one to the same request; "
                + "; ".join(self.differences[:3])
            )
        if self.restarts:
            reasons.append(f"the engine crashed {self.restarts:.0f} times")
        if self.engine_errors:
            reasons.append(f"{self.engine_errors:.0f} requests ended with an error of the engine")
        if last is None or last.running or last.waiting:
            left = "unknown" if last is None else f"{last.running:.0f} running, {last.waiting:.0f} waiting"
            reasons.append(f"requests are left after the load: {left}")
        if last is not None and last.unowned_rows:
            reasons.append(f"{last.unowned_rows:.0f} rows of the cache hold tokens of no request")
        if last is not None and self.samples and last.files > self.samples[0].files + FILES_SLACK:
            reasons.append(f"open files: {self.samples[0].files:.0f} at the start, {last.files:.0f} at the end")
        if self.growth > self.plan.max_growth:
            reasons.append(f"memory without the cache grew by {self.growth:.1%} after the first third")
        return reasons

    def table(self) -> TextTable:
        """The curve of the memory."""
        step = max(1, len(self.samples) // _SHOWN_ROWS)
        shown = [*self.samples[::step], *([self.last] if self.last is not None else [])]
        rows: list[tuple[Cell, ...]] = [
            (f"{s.seconds / 60:.1f}", s.requests, *(x / _MB for x in (s.resident, s.cache, s.rest)),
             *(int(x) for x in (s.running, s.waiting, s.files)))
            for s in shown
        ]  # fmt: skip
        header = ("minute", "requests", "memory MB", "cache MB", "rest MB", "running", "waiting", "files")
        return TextTable(header, rows, digits=0)


class Soak:
    """Runs clients in threads, and watches the server meanwhile."""

    def __init__(self, target: SoakTarget, plan: SoakPlan) -> None:
        self._target, self._plan = target, plan
        self._address = metrics_address(target.url)
        self._known, self._lock = KnownAnswers(), threading.Lock()
        self._report, self._ends, self._started = SoakReport(plan), threading.Event(), 0.0

    def run(self, on_sample: Callable[[SoakSample], None] | None = None) -> SoakReport:
        """Load the server as long as the plan says, and wait until it is idle.

        Raises:
            ValueError: it has no metrics.
        """
        first = self._read()
        self._started = time.monotonic()
        threads = [threading.Thread(target=self._act, args=(i,), daemon=True) for i in range(self._plan.clients)]
        for thread in threads:
            thread.start()
        try:
            self._watch(on_sample)
        finally:
            self._ends.set()
        for thread in threads:
            thread.join()
        self._report.differences = self._known.differences
        self._report.last = self._wait_until_idle()
        now, name, failed = self._read(), "request_success_total", {"finished_reason": "error"}
        self._report.engine_errors = now.total(name, **failed) - first.total(name, **failed)
        self._report.restarts = now.total("engine_restarts_total") - first.total("engine_restarts_total")
        return self._report

    def _read(self) -> Snapshot:
        return read_metrics(self._address, self._target.api_key)

    def _sample(self) -> SoakSample:
        seconds, requests = time.monotonic() - self._started, sum(self._report.done.values())
        return SoakSample.of(self._read(), seconds, requests)

    def _watch(self, on_sample: Callable[[SoakSample], None] | None) -> None:
        interval = self._plan.seconds / self._plan.samples
        for number in range(self._plan.samples + 1):
            time.sleep(max(0.0, self._started + number * interval - time.monotonic()))
            try:
                self._report.samples.append(self._sample())
            except ValueError as error:
                self._count_error(f"metrics: {error}")
                continue
            if on_sample is not None:
                on_sample(self._report.samples[-1])

    def _act(self, number: int) -> None:
        client = SoakClient(self._target, self._known, number)
        while not self._ends.is_set():
            try:
                name = act(client)
            except BusyError:
                with self._lock:
                    self._report.refused += 1
                self._ends.wait(_BUSY_PAUSE)
            except SoakError as error:
                self._count_error(str(error))
            else:
                with self._lock:
                    self._report.done[name] += 1

    def _count_error(self, error: str) -> None:
        with self._lock:
            self._report.errors.append(error)

    def _wait_until_idle(self) -> SoakSample:
        """The state when nothing runs or waits, or after the clients' time-out."""
        end = time.monotonic() + self._target.timeout
        while True:
            sample = self._sample()
            leaves = sample.files > self._report.samples[0].files + FILES_SLACK if self._report.samples else False
            if not (sample.running or sample.waiting or leaves) or time.monotonic() > end:
                return sample
            time.sleep(0.2)


def verdict(report: SoakReport) -> str:
    """The verdict in one line, and a line for each problem."""
    problems, done = report.problems(), sum(report.done.values())
    minutes = report.plan.seconds / 60
    line = (
        f"{done} requests in {minutes:g} minutes, {report.refused} refused because of load, "
        f"{len(report.errors)} errors, {len(report.differences)} different answers; "
        f"memory without the cache {report.growth:+.1%} after the first third"
    )
    return "\n".join([f"{'FAILED' if problems else 'passed'}: {line}", *(f"- {p}" for p in problems)])


def kinds_table(report: SoakReport) -> TextTable:
    """How often clients did what."""
    rows: Sequence[tuple[str, int]] = sorted(report.done.items())
    return TextTable(("kind", "times"), rows)
