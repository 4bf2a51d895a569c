"""Metrics of the engine's steps: their parts, what drafting was expected to gain, and what it gained."""

from collections import Counter as Counts
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from foretell.engine.budget_statistics import REASONS, BudgetStatistics, Forecast
from foretell.engine.engine import Engine
from foretell.engine.statistics import StepTime
from foretell.serve.metrics.histogram import FastHistogram
from foretell.serve.metrics.registry import MetricTables

STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS_READ_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
RECENT = 512
"""Steps over which the gauges of speed-up are taken."""
_MIN_STEPS = 16
"""Decoding steps before the cost of a pass is known well enough."""
_GATHERED = 32
"""Steps of a busy engine that are counted together: counting takes longer after every pass."""


@dataclass(frozen=True)
class _StepGain:
    """Seconds of a decoding step, and those that plain decoding would have taken for as many tokens."""

    plain: float
    spent: float
    expected_plain: float
    """For the tokens that were expected."""
    expected: float
    """Seconds that were expected of the step."""
    drafted: int
    requests: int
    new: int
    expected_new: float
    """Tokens that were expected."""


class StepMetrics:
    """Observes the steps of an engine, in its thread.

    The seconds of plain decoding are those that the engine's budget expects.
    """

    def __init__(self, tables: MetricTables, labels: tuple[str, str]) -> None:
        own, names = tables.own, ("model_name", "engine")
        steps = FastHistogram("step_seconds", "Time of a step.", ("phase",), own, STEP_BUCKETS)
        self._phases = tuple(steps.labels(phase) for phase in ("draft", "verify", "sample", "host"))
        self._read = FastHistogram(
            "iteration_tokens_total", "Tokens read by a pass.", names, tables.shared, TOKENS_READ_BUCKETS
        ).labels(*labels)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*names, *more), registry=own)

        drafted = counter("spec_steps", "Decoding steps, with drafts and without.", "drafts")
        self._steps = {yes: drafted.labels(*labels, "yes" if yes else "no") for yes in (True, False)}
        self._seconds = counter("spec_decode_seconds", "Seconds of decoding steps.").labels(*labels)
        self._plain_seconds = counter(
            "spec_plain_seconds", "Seconds that plain decoding would have taken for the tokens of these steps."
        ).labels(*labels)
        self._expected = counter("spec_expected_tokens", "New tokens expected by the drafters.").labels(*labels)
        self._obtained = counter("spec_obtained_tokens", "New tokens of the steps with an expectation.").labels(*labels)
        self._undrafted = counter("spec_undrafted_steps", "Steps of requests without drafts, by reason.", "reason")
        for reason in REASONS:
            self._undrafted.labels(*labels, reason)
        self._switched = counter("spec_controller_switches", "Drafting switched on or off by measured times.", "to")
        for to in ("on", "off"):
            self._switched.labels(*labels, to)
        self._labels, self._seen, self._steps_seen = labels, Counts[str](), 0
        self._uncounted = list[tuple[StepTime, Forecast, float]]()
        self._recent = deque[_StepGain](maxlen=RECENT)
        for name, text, value in (
            ("spec_realised_speedup", "Speed over plain decoding in the last steps.", self.realised_speedup),
            ("spec_predicted_speedup", "The speed-up that was expected of them.", self.predicted_speedup),
            ("spec_drafts_per_request", "Drafts verified per request and step of them.", self.drafts_per_request),
            ("spec_realised_tokens_per_pass", "New tokens per request and pass of them.", self.realised_tokens),
            ("spec_predicted_tokens_per_pass", "Those that were expected.", self.predicted_tokens),
        ):
            Gauge(name, text, names, registry=own).labels(*labels).set_function(value)

    def step(self, engine: Engine, seconds: float) -> None:
        """Take the last step of an engine, which took so many seconds in all."""
        self._uncounted.append((engine.last_step, engine.budget.last, seconds))
        if len(self._uncounted) < _GATHERED and engine.busy:
            return
        for taken in self._uncounted:
            self._count(*taken)
        self._uncounted.clear()
        self._count_decisions(engine.budget.statistics)

    def _count(self, time: StepTime, forecast: Forecast, seconds: float) -> None:
        draft, verify, sample, host = self._phases
        draft.observe(time.draft)
        verify.observe(time.verify)
        sample.observe(time.sample)
        host.observe(max(seconds - time.draft - time.verify - time.sample, 0.0))
        self._read.observe(time.counts.read)
        if not time.counts.reads_prompt:
            self._steps[time.counts.drafted > 0].inc()
            self._count_gain(time, forecast)

    def realised_speedup(self) -> float:
        """Tokens per second of the last steps over those of plain decoding; 1 before there are any."""
        gains = list(self._recent)
        spent = sum(g.spent for g in gains)
        return sum(g.plain for g in gains) / spent if spent else 1.0

    def predicted_speedup(self) -> float:
        """What was expected of the same steps."""
        gains = list(self._recent)
        expected = sum(g.expected for g in gains)
        return sum(g.expected_plain for g in gains) / expected if expected else 1.0

    def drafts_per_request(self) -> float:
        """Drafts verified per request and step of the same steps."""
        return self._per_request(lambda gain: gain.drafted)

    def realised_tokens(self) -> float:
        """New tokens per request and pass of the same steps."""
        return self._per_request(lambda gain: gain.new)

    def predicted_tokens(self) -> float:
        """What was expected of them."""
        return self._per_request(lambda gain: gain.expected_new)

    def _per_request(self, count: Callable[[_StepGain], float]) -> float:
        gains = list(self._recent)
        return sum(map(count, gains)) / max(1, sum(g.requests for g in gains))

    def _count_gain(self, time: StepTime, forecast: Forecast) -> None:
        counts = time.counts
        self._steps_seen += 1
        if self._steps_seen <= _MIN_STEPS or not counts.requests:
            return
        per_token = forecast.plain_seconds / counts.requests
        expected = counts.new if forecast.tokens is None else forecast.tokens
        spent = time.draft + time.verify + time.sample
        gain = _StepGain(
            plain=counts.new * per_token,
            spent=spent,
            expected_plain=expected * per_token,
            expected=spent if forecast.tokens is None else forecast.seconds,
            drafted=counts.drafted,
            requests=counts.requests,
            new=counts.new,
            expected_new=expected,
        )
        self._recent.append(gain)
        self._seconds.inc(spent)
        self._plain_seconds.inc(gain.plain)
        if forecast.tokens is not None:
            self._expected.inc(forecast.tokens)
            self._obtained.inc(counts.new)

    def _count_decisions(self, statistics: BudgetStatistics) -> None:
        now = Counts({"on": statistics.switched_on, "off": statistics.switched_off} | statistics.undrafted)
        if now == self._seen:
            return
        for name, count in now.items():
            # What a new engine counts begins at 0.
            more, before = self._switched if name in ("on", "off") else self._undrafted, self._seen[name]
            more.labels(*self._labels, name).inc(count - before if count >= before else count)
        self._seen = now
