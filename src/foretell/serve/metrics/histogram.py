"""Histograms that cost next to nothing to observe: several are, in every step of the engine."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Series:
    """The values of one set of labels. One thread observes; any may read, and misses a value at most."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class FastHistogram(Collector):
    """A histogram with labels, without the locks and the search through all buckets of `prometheus_client`'s own.

    `buckets`: upper bounds, ascending; what lies above is counted as `+Inf`.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._label_names = name, text, labels
        self._bounds = tuple(float(bound) for bound in buckets)
        self._shown = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series = dict[tuple[str, ...], Series]()
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these values of the labels."""
        return self._series.setdefault(values, Series(self._bounds))

    def describe(self) -> Iterator[Metric]:
        """Its name and kind."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._label_names)

    def collect(self) -> Iterator[Metric]:
        """All series."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, series in self._series.items():
            buckets = list(zip(self._shown, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets, series.sum)
        yield family
