"""The ASGI application: its endpoints and middleware."""

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from foretell.serve.auth import KeyMiddleware
from foretell.serve.errors import ApiError
from foretell.serve.handlers import conversations, info, ollama, text
from foretell.serve.handlers.endpoint import Endpoint, EndpointApp
from foretell.serve.metrics.http import HttpMetrics, HttpMetricsMiddleware
from foretell.serve.metrics.registry import CONTENT_TYPE, MetricTables
from foretell.serve.metrics.rejections import Rejections
from foretell.serve.openapi import openapi
from foretell.serve.origin import OriginMiddleware
from foretell.serve.page.document import document as page
from foretell.serve.page.document import headers as page_headers
from foretell.serve.protocol.chat import ChatBody, ChatCompletion
from foretell.serve.protocol.completions import Completion, CompletionBody
from foretell.serve.protocol.info import (
    DetokenizeAnswer,
    DetokenizeBody,
    HealthAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeBody,
    VersionAnswer,
)
from foretell.serve.protocol.messages import CountTokensBody, MessageAnswer, MessagesBody, TokenCount
from foretell.serve.protocol.ollama import (
    OllamaAnswer,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaModelInfo,
    OllamaModels,
    OllamaShowBody,
)
from foretell.serve.protocol.responses import InputTokens, ResponseAnswer, ResponsesBody
from foretell.serve.request_id import NAME, RequestIdMiddleware
from foretell.serve.service import Service
from foretell.serve.settings import ServerSettings
from foretell.serve.sse import EVENTS, LINES
from foretell.serve.warnings import WARNING_HEADER

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint("POST", "/v1/chat/completions", "Answer a conversation", text.chat_completions, ChatCompletion, ChatBody,
             streams=EVENTS),
    Endpoint("POST", "/v1/completions", "Continue prompts", text.completions, Completion, CompletionBody,
             streams=EVENTS),
    Endpoint("POST", "/v1/responses", "Answer a conversation of items", conversations.responses, ResponseAnswer,
             ResponsesBody, streams=EVENTS),
    Endpoint("POST", "/v1/responses/input_tokens", "Count the tokens of a conversation of items",
             conversations.response_tokens, InputTokens, ResponsesBody),
    Endpoint("POST", "/v1/messages", "Answer a conversation (Anthropic)", conversations.messages, MessageAnswer,
             MessagesBody, streams=EVENTS),
    Endpoint("POST", "/v1/messages/count_tokens", "Count the tokens of a conversation (Anthropic)",
             conversations.message_tokens, TokenCount, CountTokensBody),
    Endpoint("POST", "/api/chat", "Answer a conversation (Ollama)", ollama.answer, OllamaAnswer, OllamaChatBody,
             streams=LINES),
    Endpoint("POST", "/api/generate", "Answer or continue a prompt (Ollama)", ollama.answer, OllamaAnswer,
             OllamaGenerateBody, streams=LINES),
    Endpoint("GET", "/api/tags", "List the served models (Ollama)", ollama.models, OllamaModels),
    Endpoint("GET", "/api/ps", "List the models in memory (Ollama)", ollama.models, OllamaModels),
    Endpoint("POST", "/api/show", "A served model (Ollama)", ollama.show, OllamaModelInfo, OllamaShowBody),
    Endpoint("GET", "/api/version", "The version of the API (Ollama)", ollama.show_version, VersionAnswer),
    Endpoint("GET", "/v1/models", "List the served models", info.models, ModelList),
    Endpoint("GET", "/v1/models/{model}", "A served model", info.model, ModelCard),
    Endpoint("POST", "/tokenize", "Token ids of a text or a conversation", info.tokenize, TokenizeAnswer,
             TokenizeBody),
    Endpoint("POST", "/detokenize", "The text of token ids", info.detokenize, DetokenizeAnswer, DetokenizeBody),
    Endpoint("GET", "/health", "Whether requests can be served now", info.health, HealthAnswer),
    Endpoint("GET", "/live", "Whether the process answers", info.live, HealthAnswer),
    Endpoint("GET", "/version", "The version of the server", info.show_version, VersionAnswer),
)  # fmt: skip
"""Every endpoint; a new one is a line here and a handler."""
_CORS_SECONDS = 600
_NOT_MADE = ("embeddings", "moderations", "images", "audio", "rerank", "score", "files", "batches", "infill")
"""What other servers of these APIs make, by the first part of its path."""


def create_app(service: Service) -> Starlette:
    """The application that serves a model. The caller starts and stops the service."""

    async def metrics() -> bytes:
        return service.metrics.text()

    return public_app(
        service.settings,
        service.metrics,
        service.rejections,
        lambda endpoint: EndpointApp(endpoint, service),
        metrics,
    )


def engine_app(service: Service) -> Starlette:
    """The endpoints of a service alone: what a replica behind a gateway runs. The gateway asks for keys, counts
    requests and shows metrics.
    """
    routes = _endpoint_routes(lambda endpoint: EndpointApp(endpoint, service))
    middleware = [Middleware(RequestIdMiddleware), *_traces(service.settings)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)


def public_app(
    settings: ServerSettings,
    tables: MetricTables,
    rejections: Rejections,
    app_of: Callable[[Endpoint], ASGIApp],
    metrics: Callable[[], Awaitable[bytes]],
) -> Starlette:
    """The application that clients call: its endpoints as `app_of` makes them, the page and `/metrics`, behind request
    ids, metrics of HTTP (in `tables`), CORS and keys.
    """
    document = to_json(openapi(ENDPOINTS))

    async def show_openapi(http: HttpRequest) -> Response:
        return Response(document, media_type="application/json")

    async def show_page(http: HttpRequest) -> Response:
        return HTMLResponse(page(), headers=page_headers())

    async def show_metrics(http: HttpRequest) -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE)

    routes = _endpoint_routes(app_of)
    routes.append(Route("/openapi.json", show_openapi))
    routes.append(Route("/metrics", show_metrics))
    routes.append(Route("/", show_page))
    http_metrics = HttpMetrics(tables, {route.path for route in routes})
    middleware = [
        Middleware(RequestIdMiddleware),
        Middleware(HttpMetricsMiddleware, metrics=http_metrics),
        Middleware(OriginMiddleware, hosts=settings.allowed_hosts, origins=settings.cors_origins),
    ]
    middleware += _traces(settings)
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[NAME, WARNING_HEADER],
                max_age=_CORS_SECONDS,
            )
        )
    middleware.append(
        Middleware(KeyMiddleware, keys=settings.api_keys, per_key=settings.limits.per_key, rejections=rejections)
    )
    return Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)


def _traces(settings: ServerSettings) -> list[Middleware]:
    if settings.otlp_traces_endpoint is None:
        return []
    from foretell.serve.metrics.traces import TraceMiddleware

    return [Middleware(TraceMiddleware)]


def _endpoint_routes(app_of: Callable[[Endpoint], ASGIApp]) -> list[Route]:
    return [Route(e.path.replace("{model}", "{model:path}"), app_of(e), methods=[e.method]) for e in ENDPOINTS]


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """An unknown path or method, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    path = http.url.path
    if (refusal := ollama.refusal(path)) is not None:
        return refusal.response(path)
    message = f"{HTTPStatus(error.status_code).phrase}: {http.method} {path}"
    if (first := path.removeprefix("/v1").strip("/").split("/")[0]) in _NOT_MADE:
        message += f"; this server makes no {first}: it writes text, and /openapi.json lists its endpoints"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response(path)


_HANDLERS: dict[Any, Any] = {HTTPException: _http_error}
