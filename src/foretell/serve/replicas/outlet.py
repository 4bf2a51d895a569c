"""Runs an ASGI application for a forwarded request, and gives its answer in pieces that are not too many."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Scope

from foretell.serve.replicas.messages import Answer, ForwardedRequest, Head, Piece
from foretell.serve.tenants import API_KEY


async def run_app(app: ASGIApp, request: ForwardedRequest, interval: Callable[[], float]) -> Answer:
    """The answer of an application.

    A piece follows the one before after `interval()` seconds at the earliest. The application waits meanwhile, and
    writes what has come in the meantime as one event. Closing the generator cancels the application.
    """
    outlet = _Outlet(request)
    task = asyncio.create_task(outlet.run(app))
    try:
        yield await outlet.head()
        while (piece := await outlet.piece()).more:
            yield piece
            await asyncio.sleep(interval())
        yield piece
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Outlet:
    """The two ends of an application: ASGI's on one side, the parts of its answer on the other."""

    def __init__(self, request: ForwardedRequest) -> None:
        self._request = request
        self._messages: asyncio.Queue[Message | BaseException] = asyncio.Queue(1)
        self._read = False

    async def run(self, app: ASGIApp) -> None:
        """Run the application."""
        API_KEY.set(self._request.api_key)
        try:
            await app(_scope(self._request), self._receive, self._messages.put)
        except Exception as error:
            await self._messages.put(error)

    async def head(self) -> Head:
        """Status and headers."""
        message = await self._next()
        return Head(message["status"], tuple(message["headers"]))

    async def piece(self) -> Piece:
        """What is there, or the next bytes."""
        data, more = b"", True
        while more and (not data or await self._more()):
            message = await self._next()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        return Piece(data, more)

    async def _more(self) -> bool:
        """Whether the application has another message at once."""
        await asyncio.sleep(0)
        return not self._messages.empty()

    async def _next(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, BaseException):
            raise message
        return message

    async def _receive(self) -> Message:
        if self._read:  # The generator is closed when the client goes away.
            await asyncio.Event().wait()
        self._read = True
        return {"type": "http.request", "body": self._request.body, "more_body": False}


def _scope(request: ForwardedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
    }
