"""Metrics of the engine's steps: their parts, what drafting was expected to gain, and what it gained."""

from collections import deque
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from foretell.engine.engine import Engine
from foretell.engine.statistics import StepCounts, StepTime
from foretell.serve.metrics.histogram import FastHistogram
from foretell.serve.metrics.registry import MetricTables
from foretell.shape.pass_cost import PassCost

STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS_READ_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
RECENT = 512
"""Steps over which the gauges of speed-up are taken."""
_MIN_STEPS = 16
"""Decoding steps before the cost of a pass is known well enough."""


@dataclass(frozen=True)
class _StepGain:
    """Seconds of a decoding step, and those that plain decoding would have taken for as many tokens."""

    plain: float
    spent: float
    expected_plain: float
    """For the tokens that were expected."""
    expected: float
    """Seconds that were expected of the step."""


class StepMetrics:
    """Observes the steps of an engine, in its thread.

    The seconds of plain decoding are estimated from the times of passes by their tokens (`PassCost`), which are learned
    from all decoding steps.
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
        self._switched = counter("spec_controller_switches", "Drafting switched on or off by measured times.", "to")
        self._labels, self._switches_seen = labels, (0, 0)
        self._cost, self._learned, self._draft_seconds = PassCost(), 0, 0.0
        self._recent = deque[_StepGain](maxlen=RECENT)
        for name, text, value in (
            ("spec_realised_speedup", "Speed over plain decoding in the last steps.", self.realised_speedup),
            ("spec_predicted_speedup", "The speed-up that was expected of them.", self.predicted_speedup),
        ):
            Gauge(name, text, names, registry=own).labels(*labels).set_function(value)

    def step(self, engine: Engine, seconds: float) -> None:
        """Count the last step of an engine, which took so many seconds in all."""
        time = engine.last_step
        draft, verify, sample, host = self._phases
        draft.observe(time.draft)
        verify.observe(time.verify)
        sample.observe(time.sample)
        host.observe(max(seconds - time.draft - time.verify - time.sample, 0.0))
        self._read.observe(time.counts.read)
        if not time.counts.reads_prompt:
            self._steps[time.counts.drafted > 0].inc()
            self._count_gain(time, time.counts)
        self._count_switches(engine)

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

    def _count_gain(self, time: StepTime, counts: StepCounts) -> None:
        passed, cost = time.verify + time.sample, self._cost
        if self._learned >= _MIN_STEPS and counts.requests:
            per_token = cost.seconds_of([counts.requests])[0] / counts.requests
            expected = counts.new if counts.expected is None else counts.expected
            pass_seconds = cost.seconds_of([counts.read])[0]
            drafting = self._draft_seconds if counts.drafted else 0.0
            gain = _StepGain(counts.new * per_token, time.draft + passed, expected * per_token, drafting + pass_seconds)
            self._recent.append(gain)
            self._seconds.inc(gain.spent)
            self._plain_seconds.inc(gain.plain)
            if counts.expected is not None:
                self._expected.inc(counts.expected)
                self._obtained.inc(counts.new)
        if counts.drafted:
            known = self._draft_seconds or time.draft
            self._draft_seconds += (time.draft - known) / _MIN_STEPS if self._draft_seconds else known
        cost.update(counts.read, passed)
        self._learned += 1

    def _count_switches(self, engine: Engine) -> None:
        statistics = engine.switch if engine.controller is None else engine.controller.statistics
        if statistics is None:
            return
        switches = statistics.switched_on, statistics.switched_off
        if switches == self._switches_seen:
            return
        for to, now, before in zip(("on", "off"), switches, self._switches_seen, strict=True):
            # What switches in a new engine begins at 0.
            self._switched.labels(*self._labels, to).inc(now - before if now >= before else now)
        self._switches_seen = switches
