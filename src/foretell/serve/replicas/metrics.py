"""Metrics of several replicas as those of one server: the label `engine` says which replica."""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

LABEL = "engine"


class MergedMetrics:
    """A collector of what a gateway and its replicas report in Prometheus' text format."""

    def __init__(self, gateway: bytes, replicas: Sequence[tuple[int, bytes]]) -> None:
        self._gateway, self._replicas = gateway, replicas

    def collect(self) -> Iterable[Metric]:
        """All metrics; those of the same name together, as the format asks for."""
        merged = {family.name: family for family in _families(self._gateway)}
        for number, text in self._replicas:
            for family in _families(text):
                samples = [s._replace(labels=dict(s.labels) | {LABEL: str(number)}) for s in family.samples]
                merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged[family.name].samples += samples
        return merged.values()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self)


def _families(text: bytes) -> Iterable[Metric]:
    return text_string_to_metric_families(text.decode())
