"""The server in front of the replicas."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.serve.app import public_app
from foretell.serve.errors import overloaded, unavailable
from foretell.serve.handlers.endpoint import IN_POOL_BYTES, Endpoint, error_response, read_body
from foretell.serve.metrics.registry import MetricTables
from foretell.serve.metrics.rejections import Rejections
from foretell.serve.replicas.exchange import Exchange
from foretell.serve.replicas.messages import ForwardedRequest, Replicas
from foretell.serve.replicas.metrics import MergedMetrics
from foretell.serve.replicas.prefixes import Prefix, prefix_of
from foretell.serve.request_id import NAME as REQUEST_ID
from foretell.serve.service import State
from foretell.serve.settings import ServerSettings
from foretell.serve.tenants import API_KEY

log = logging.getLogger(__name__)
LABEL = "gateway"
"""In the place of a replica's number, in metrics."""
WATCH_SECONDS = 1.0
"""Between two looks at which replicas run."""
CLOSE_SECONDS = 2.0
"""For streams that a shutdown has cut to be written."""
HOP_HEADERS = {b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding",
               b"upgrade"}  # fmt: skip
"""Of one connection, which is not that of the replica."""
SECRET_HEADERS = {b"authorization", b"x-api-key", b"cookie"}
"""Replicas have no use for them."""
LEFT_OUT = HOP_HEADERS | SECRET_HEADERS | {REQUEST_ID.lower().encode()}
"""Headers of a request that are not forwarded."""


class Gateway:
    """Admits requests and gives them to replicas. All methods run in the event loop."""

    def __init__(self, settings: ServerSettings, replicas: Replicas) -> None:
        self.settings, self._replicas = settings, replicas
        self.state = State.LOADING
        self.running = 0
        """Replicas that can answer."""
        self._exchanges = set[Exchange]()
        self._empty = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._tables = MetricTables(settings.metrics_prefixes)
        self._rejections = Rejections(self._tables, (settings.served_names[0], LABEL))
        self.app: Starlette = public_app(settings, self._tables, self._rejections, self._app_of, self._metrics)
        """What clients call."""

    async def start(self) -> None:
        """Start the replicas.

        Raises:
            ValueError: the model cannot be loaded.
        """
        await self._replicas.start()
        self.running = await self._replicas.running()
        self._watcher = asyncio.create_task(self._watch())
        if self.state is State.LOADING:
            self.state = State.SERVING

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones as long as the settings say; the rest ends."""
        self.state = State.DRAINING
        if not await self._until_empty(self.settings.timeouts.shutdown):
            for exchange in self._exchanges:
                exchange.end(unavailable(self.state.value))
            await self._until_empty(CLOSE_SECONDS)

    async def stop(self) -> None:
        """End the replicas."""
        self.state = State.STOPPED
        if self._watcher is not None:
            self._watcher.cancel()
        await self._replicas.stop()

    def check_ready(self) -> None:
        """Raise `ApiError` (503) unless requests can be served."""
        if self.state is not State.SERVING:
            raise unavailable(self.state.value, 1 if self.state is State.LOADING else None)
        if not self.running:
            raise unavailable("no replica is running; one is being started", 1)

    def admit_request(self) -> None:
        """Raise `ApiError` (429) if too many requests wait; called before any work is done for a request."""
        limits = self.settings.limits
        rows = limits.max_num_seqs * max(self.running, 1)
        queued = len(self._exchanges) - rows
        if queued >= limits.queued_requests:
            self._rejections.count("queue")
            raise overloaded(f"{queued} requests are waiting; try again later", 1 + math.ceil(queued / rows))

    async def forward(self, request: ForwardedRequest, receive: Receive, send: Send) -> None:
        """Let a replica answer; see `Exchange.run`."""
        exchange = Exchange(self._replicas, request, send)
        with self._open(exchange):
            await exchange.run(receive)

    @contextlib.contextmanager
    def _open(self, exchange: Exchange) -> Iterator[None]:
        self._exchanges.add(exchange)
        self._empty.clear()
        try:
            yield
        finally:
            self._exchanges.remove(exchange)
            if not self._exchanges:
                self._empty.set()

    async def _until_empty(self, seconds: float) -> bool:
        """Whether all answers were over in time."""
        if self._exchanges:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        return not self._exchanges

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            before = self.running
            try:
                self.running = await self._replicas.running()
            except Exception:
                log.exception("the state of the replicas is not known")
                self.running = 0
            if self.running != before:
                log.warning("replicas", extra={"fields": {"running": self.running, "before": before}})

    async def _metrics(self) -> bytes:
        replicas = await self._replicas.metrics() if self.running else []
        return MergedMetrics(self._tables.text(), replicas).text()

    def _app_of(self, endpoint: Endpoint) -> ASGIApp:
        if endpoint.path == "/health":
            return _Status(endpoint, self.check_ready)
        if endpoint.path == "/live":
            return _Status(endpoint, lambda: None)
        return _Forward(endpoint, self)


class _Status:
    """An endpoint that says whether a check is passed."""

    def __init__(self, endpoint: Endpoint, check: Callable[[], None]) -> None:
        self._endpoint, self._check = endpoint, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        response: ASGIApp = JSONResponse({"status": "ok"})
        try:
            self._check()
        except Exception as error:
            response = error_response(error, self._endpoint, scope["path"])
        await response(scope, receive, send)


class _Forward:
    """An endpoint that a replica answers."""

    def __init__(self, endpoint: Endpoint, gateway: Gateway) -> None:
        self._endpoint, self._gateway = endpoint, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            self._gateway.check_ready()
            self._gateway.admit_request()
            await self._gateway.forward(await self._read(HttpRequest(scope, receive)), receive, send)
        except Exception as error:
            await error_response(error, self._endpoint, scope["path"])(scope, receive, send)

    async def _read(self, http: HttpRequest) -> ForwardedRequest:
        body, prefix, key = b"", Prefix(), API_KEY.get()
        if self._endpoint.body is not None:
            body = await read_body(http, self._gateway.settings.limits)
            large = len(body) >= IN_POOL_BYTES
            prefix = await asyncio.to_thread(prefix_of, body, key) if large else prefix_of(body, key)
        headers = [header for header in http.headers.raw if header[0] not in LEFT_OUT]
        headers.append((REQUEST_ID.lower().encode(), http.scope["request_id"].encode()))
        query = http.scope["query_string"]
        return ForwardedRequest(http.method, http.scope["path"], query, tuple(headers), body, prefix, key)
