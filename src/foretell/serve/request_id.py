"""`X-Request-Id`: a client's own, or a new one, in every answer."""

import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "X-Request-Id"
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""Of the HTTP request that is being answered."""
MAX_CHARS = 128


class RequestIdMiddleware:
    """Gives every answer an `X-Request-Id`; handlers find it in `scope["request_id"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = scope["request_id"] = _valid(Headers(scope=scope).get(NAME)) or uuid.uuid4().hex
        REQUEST_ID.set(number)
        await self._app(scope, receive, with_header(send, NAME, number))


def with_header(send: Send, name: str, value: str) -> Send:
    """Sends an answer with one header more."""

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return send_with_header


def _valid(given: str | None) -> str | None:
    usable = given is not None and 0 < len(given) <= MAX_CHARS and given.isascii() and given.isprintable()
    return given if usable else None
