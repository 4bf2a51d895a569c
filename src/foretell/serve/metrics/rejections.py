"""Requests that were refused because of load, by reason."""

from prometheus_client import Counter

from foretell.serve.metrics.registry import MetricTables

REASONS = ("queue", "tokens", "key")
"""A full queue of requests, a full queue of prompt tokens, too many requests of one API key."""


class Rejections:
    """Counts refused requests, under vLLM's name."""

    def __init__(self, tables: MetricTables, labels: tuple[str, str]) -> None:
        names = ("model_name", "engine", "reason")
        counter = Counter("admission_rejections", "Requests refused because of load.", names, registry=tables.shared)
        self._counters = {reason: counter.labels(*labels, reason) for reason in REASONS}

    def count(self, reason: str) -> None:
        """Count one."""
        self._counters[reason].inc()
