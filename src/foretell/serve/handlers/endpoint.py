"""An endpoint: reads and validates the body, calls the handler, and turns errors into answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.serve.errors import CLIENT_CLOSED_REQUEST, ApiError, bad_request, server_error, validation_error
from foretell.serve.protocol.base import Body
from foretell.serve.request_id import with_header
from foretell.serve.service import Service
from foretell.serve.settings import Limits
from foretell.serve.warnings import WARNING_HEADER, log_once, warning_of
from foretell.utils.validation import parse_object

log = logging.getLogger(__name__)
IN_POOL_BYTES = 1 << 16
"""Bodies from this size on are parsed in a thread."""

B = TypeVar("B", bound=Body)
Handler = Callable[[Service, HttpRequest, Any], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Endpoint:
    """A path with its handler and the types of its bodies."""

    method: str
    path: str
    summary: str
    handler: Handler
    answer: type[BaseModel]
    body: type[Body] | None = None
    streams: str = ""
    """Media type of the stream that the answer can be; empty: it is none."""


class EndpointApp:
    """An endpoint of a service as an ASGI application."""

    def __init__(self, endpoint: Endpoint, service: Service) -> None:
        self._endpoint, self._service = endpoint, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        http, body = HttpRequest(scope, receive, send), None
        response: ASGIApp
        try:
            body = await self._body(http)
            response = await self._endpoint.handler(self._service, http, body)
        except Exception as error:
            response = error_response(error, self._endpoint, scope["path"])
        warning = "" if body is None else warning_of(body)
        if warning:
            log_once(self._endpoint.path, warning)
            send = with_header(send, WARNING_HEADER, warning)
        await response(scope, receive, send)

    async def _body(self, http: HttpRequest) -> Body | None:
        service, kind = self._service, self._endpoint.body
        if kind is None:
            return None
        service.check_ready()
        service.admit_request()
        data = await read_body(http, service.settings.limits)
        if len(data) < IN_POOL_BYTES:
            return parse_body(kind, data)
        return await service.in_pool(parse_body, kind, data)


def error_response(error: Exception, endpoint: Endpoint, path: str) -> Response:
    """What the client sees of an error; one that is not its own is logged."""
    if isinstance(error, ClientDisconnect):
        error = ApiError(CLIENT_CLOSED_REQUEST, "the client went away")
    if not isinstance(error, ApiError):
        log.error("%s %s failed", endpoint.method, endpoint.path, exc_info=error)
        error = server_error("an error of the server; its log has more")
    return error.response(path)


async def read_body(http: HttpRequest, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is compressed, too large, or too slow.
    """
    if http.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not read; send the JSON as it is")
    try:
        return await asyncio.wait_for(_read_body(http, limits.body_bytes), limits.body_seconds)
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT, "the body took too long to arrive", headers={"Connection": "close"}
        ) from None


async def _read_body(http: HttpRequest, most: int) -> bytes:
    length = http.headers.get("content-length", "0")
    size = int(length) if length.isdecimal() else 0
    parts = list[bytes]()
    if size <= most:
        size = 0
        async for part in http.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                break
    if size > most:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has more than {most} bytes",
            headers={"Connection": "close"},
        )
    return b"".join(parts)


def parse_body(kind: type[B], data: bytes) -> B:
    """The body as a pydantic model.

    Raises:
        ApiError: no JSON object, or a field is wrong.
    """
    try:
        return kind.model_validate(parse_object(data, "the body"))
    except ValidationError as error:
        raise validation_error(error) from error
    except ValueError as error:
        raise bad_request(str(error)) from error
