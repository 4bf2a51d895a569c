"""OpenTelemetry traces (extra `otel`): a span per request of the engine, without texts.

Names follow the semantic conventions of generative AI (github.com/open-telemetry/semantic-conventions-genai); latencies
have vLLM's names. A `traceparent` of the HTTP request is the span's parent.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.engine.request import Request, Update, describe_error
from foretell.serve.metrics.requests import FINISH_REASONS
from foretell.serve.request_id import REQUEST_ID

EXPORT_SECONDS = 5.0
"""Longest time for the collector to take some spans; then they are lost."""
_OPERATIONS = {"/v1/completions": "text_completion"}
_CHAT = "chat"
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class _Caller:
    """What a span needs of its HTTP request."""

    operation: str
    parent: Context


_CALLER: ContextVar[_Caller | None] = ContextVar("_CALLER", default=None)


class TraceMiddleware:
    """Reads the trace that an HTTP request belongs to (W3C Trace Context)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._propagator = app, TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            parent = self._propagator.extract(dict(Headers(scope=scope)), Context())
            _CALLER.set(_Caller(_OPERATIONS.get(scope["path"], _CHAT), parent))
        await self._app(scope, receive, send)


@dataclass
class _Live:
    """A request that is not over."""

    span: Span
    opened: float
    first: float = 0.0
    tokens: int = 0


class RequestTraces:
    """Observes requests, and exports a span for each.

    `method_of`: name of the method that decodes a request; `exporter`: where spans go.
    """

    def __init__(self, model_name: str, method_of: Callable[[Request], str], exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "foretell", "service.version": version("foretell")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("foretell.serve", version("foretell"))
        self._model_name, self._method_of = model_name, method_of
        self._live = dict[int, _Live]()

    @staticmethod
    def to_collector(model_name: str, method_of: Callable[[Request], str], endpoint: str) -> "RequestTraces":
        """Traces that go to an OpenTelemetry collector, as protobuf over HTTP."""
        return RequestTraces(model_name, method_of, OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS))

    def opened(self, ticket: int, request: Request) -> None:
        """A request was given to the engine."""
        caller = _CALLER.get() or _Caller(_CHAT, Context())
        span = self._tracer.start_span(
            f"{caller.operation} {self._model_name}", context=caller.parent, kind=SpanKind.SERVER
        )
        self._live[ticket] = _Live(span, time.monotonic())
        sampling = request.sampling_params
        span.set_attributes(
            {
                "gen_ai.operation.name": caller.operation,
                "gen_ai.provider.name": "foretell",
                "gen_ai.request.model": self._model_name,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.request.max_tokens": request.max_new_tokens,
                "gen_ai.request.seed": str(sampling.seed),
                "foretell.method": self._method_of(request),
                "foretell.request_id": REQUEST_ID.get(),
            }
        )

    def updated(self, ticket: int, at: float, update: Update) -> None:
        """A request has got something."""
        live = self._live[ticket]
        if update.tokens and not live.tokens:
            live.first = at
            live.span.add_event("first token", timestamp=_timestamp(at))
        live.tokens += len(update.tokens)
        if update.finish_reason is not None:
            self._finish(self._live.pop(ticket), at, update)

    def lost(self, ticket: int) -> None:
        """A request has ended with its engine, or was refused by it."""
        live = self._live.pop(ticket, None)
        if live is not None:
            live.span.set_status(Status(StatusCode.ERROR, "the engine failed"))
            live.span.end()

    def shutdown(self) -> None:
        """Export what is left."""
        self._provider.force_flush(int(1000 * EXPORT_SECONDS))
        self._provider.shutdown()

    def _finish(self, live: _Live, at: float, update: Update) -> None:
        span, statistics = live.span, update.statistics
        span.set_attributes(
            {
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.finish_reasons": [FINISH_REASONS[update.finish_reason or "error"]],
                "gen_ai.usage.output_tokens": live.tokens,
                "gen_ai.latency.e2e": at - live.opened,
            }
        )
        if live.tokens:
            span.set_attribute("gen_ai.latency.time_to_first_token", live.first - live.opened)
        if statistics is not None:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": statistics.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": statistics.cached_tokens,
                    "gen_ai.latency.time_in_queue": statistics.queue_seconds,
                    "foretell.passes": statistics.target_passes,
                    "foretell.drafted_tokens": statistics.drafted,
                    "foretell.accepted_tokens": sum(statistics.accepted_per_position),
                    "foretell.draft_seconds": statistics.draft_seconds,
                    "foretell.verify_seconds": statistics.verify_seconds,
                }
            )
        if update.error is not None:
            span.set_status(Status(StatusCode.ERROR, describe_error(update.error)))
        span.end(end_time=_timestamp(at))


def check_endpoint(url: str) -> str:
    """The address of a collector.

    Raises:
        ValueError: no HTTP address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is no address of a collector; give one such as http://127.0.0.1:4318/v1/traces")
    return url


def _timestamp(at: float) -> int:
    """Nanoseconds since 1970 of a time of the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - at) * _NANOSECONDS)
