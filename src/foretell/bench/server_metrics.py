"""The Prometheus metrics of a running server, and what happened between two readings."""

import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

SECONDS = 10.0
"""For an answer of the server."""
MOST_BYTES = 16 << 20
PREFIXES = ("foretell:", "vllm:")
"""Of the metrics; those of other servers are read where they have the same names."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Snapshot:
    """The metrics of a server at a time: values by name without prefix, and labels."""

    at: float
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @staticmethod
    def parse(text: str, at: float) -> "Snapshot":
        """Read Prometheus' text format.

        Raises:
            ValueError: no metric of a known prefix is in it.
        """
        samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        prefix = next((p for p in PREFIXES if f"\n{p}" in f"\n{text}"), None)
        if prefix is None:
            raise ValueError("the address has no metrics of Foretell; give the address of a `foretell serve`")
        for line in text.splitlines():
            match = _SAMPLE.fullmatch(line.strip()) if line.startswith(prefix) else None
            if match is not None:
                name, labels, value = match.groups()
                samples[name.removeprefix(prefix), frozenset(_LABEL.findall(labels or ""))] = float(value)
        return Snapshot(at, samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name with these labels."""
        wanted = labels.items()
        return sum(
            v for (n, sample_labels), v in self.values.items() if n == name and wanted <= dict(sample_labels).items()
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of a name by the value of a label."""
        out = defaultdict[str, float](float)
        for (n, sample_labels), value in self.values.items():
            if n == name and label in dict(sample_labels):
                out[dict(sample_labels)[label]] += value
        return out


@dataclass(frozen=True)
class Interval:
    """What happened between two readings; all rates are per second."""

    before: Snapshot
    after: Snapshot

    def more(self, name: str, **labels: str) -> float:
        """How much a counter has grown; a server that was started again counts from 0."""
        grown = self.after.total(name, **labels) - self.before.total(name, **labels)
        return grown if grown >= 0 else self.after.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """Growth of a counter per second."""
        return self.more(name, **labels) / max(self.after.at - self.before.at, 1e-9)

    def ratio(self, name: str, over: str) -> float:
        """Growth of a counter over that of another; not a number if that has not grown."""
        below = self.more(over)
        return self.more(name) / below if below else math.nan

    def mean(self, histogram: str, **labels: str) -> float:
        """Mean of the values that a histogram counted."""
        count = self.more(f"{histogram}_count", **labels)
        return self.more(f"{histogram}_sum", **labels) / count if count else math.nan

    def percentile(self, histogram: str, share: float) -> float:
        """Upper bound of the bucket that holds this percentile."""
        now, then = (s.by_label(f"{histogram}_bucket", "le") for s in (self.after, self.before))
        counts = sorted((float(bound), now[bound] - then[bound]) for bound in now)
        whole = counts[-1][1] if counts else 0
        return next((bound for bound, count in counts if whole > 0 and count >= share * whole), math.nan)


def metrics_address(url: str) -> str:
    """The address of the metrics of a server.

    Raises:
        ValueError: no HTTP address.
    """
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is no address of a server; give one such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}/metrics"


def read_metrics(address: str, key: str) -> Snapshot:
    """The metrics now.

    Raises:
        ValueError: the server does not answer, asks for a key, or has no metrics.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(address, headers=headers), timeout=SECONDS) as answer:
            return Snapshot.parse(answer.read(MOST_BYTES).decode("utf-8", "replace"), time.monotonic())
    except HTTPError as error:
        if error.code == 401:
            raise ValueError(f"{address} asks for an API key; give it with --api-key") from None
        raise ValueError(f"{address} answers {error.code} {error.reason}") from None
    except (URLError, OSError) as error:
        raise ValueError(f"{address} does not answer: {getattr(error, 'reason', error)}") from None
