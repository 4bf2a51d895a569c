"""Metrics with a prefix before their names, in Prometheus' text format."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "foretell"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CREATED = "_created"


class MetricTables(Collector):
    """The metrics of a server: those with vLLM's names once per prefix, and Foretell's own.

    The times at which they were created are left out: load tools add up every line that begins with
    `vllm:spec_decode`.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self.shared, self.own = CollectorRegistry(), CollectorRegistry()
        ProcessCollector(registry=self.own)
        self._prefixes = tuple(dict.fromkeys((PREFIX, *prefixes)))

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        for prefix in self._prefixes:
            yield from (_with_prefix(metric, prefix) for metric in self.shared.collect())
        yield from (_with_prefix(metric, PREFIX) for metric in self.own.collect())

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self)


def _with_prefix(metric: Metric, prefix: str) -> Metric:
    named = Metric(f"{prefix}:{metric.name}", metric.documentation, metric.type)
    samples = [sample for sample in metric.samples if not sample.name.endswith(_CREATED)]
    named.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in samples]
    return named
