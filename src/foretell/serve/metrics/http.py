"""Counts HTTP requests, and logs them."""

import logging
import time
from collections.abc import Collection

from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretell.serve.errors import CLIENT_CLOSED_REQUEST
from foretell.serve.metrics.registry import MetricTables
from foretell.serve.metrics.requests import LATENCY_BUCKETS, TTFT_BUCKETS

log = logging.getLogger(__name__)
OTHER = "other"
MAX_PATH_CHARS = 200
"""Of a logged path."""
_METHODS = ("GET", "POST", "OPTIONS", "HEAD")
_QUIET = ("/health", "/live", "/metrics")
"""Paths that are asked every few seconds and logged at debug level."""
_BUCKETS = tuple(sorted({*TTFT_BUCKETS, *LATENCY_BUCKETS}))


class HttpMetrics:
    """HTTP requests by handler, method and status. `paths`: the known ones; all others count together."""

    def __init__(self, tables: MetricTables, paths: Collection[str]) -> None:
        self._paths = frozenset(path for path in paths if "{" not in path)
        self._patterns = {path.partition("{")[0]: path.replace(":path", "") for path in paths if "{" in path}
        labels = ("handler", "method", "status")
        self._count = Counter("http_requests", "HTTP requests.", labels, registry=tables.shared)
        self._seconds = Histogram(
            "http_request_duration_seconds", "Time of HTTP requests.", ("handler",), registry=tables.shared,
            buckets=_BUCKETS,
        )  # fmt: skip

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request that is over."""
        handler = self._handler(path)
        self._count.labels(handler, method if method in _METHODS else OTHER, str(status)).inc()
        self._seconds.labels(handler).observe(seconds)

    def _handler(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((pattern for head, pattern in self._patterns.items() if path.startswith(head)), OTHER)


class HttpMetricsMiddleware:
    """Counts and logs every request once its answer is over."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), CLIENT_CLOSED_REQUEST

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            method, path, seconds = scope["method"], scope["path"], time.monotonic() - started
            self._metrics.count(method, path, status, seconds)
            fields = {"method": method, "path": path[:MAX_PATH_CHARS], "status": status, "seconds": round(seconds, 6)}
            level = logging.DEBUG if path in _QUIET else logging.INFO
            log.log(level, "http", extra={"fields": fields})
