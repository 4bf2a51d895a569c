"""Server-sent events and lines of JSON, and a response that streams them while it watches for the client to go away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DATA, END = b"data: ", b"\n\n"
"""Around the JSON of an event."""
DONE = DATA + b"[DONE]" + END
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams."""
PING, BLANK = b": ping\n\n", b" "
"""What keeps a silent stream of events open, and one of lines of JSON: a blank before the next line."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """One line of JSON; numbers that JSON does not have become `null`."""
    return to_json(data, inf_nan_mode="null")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """An event with one line of JSON; `name`: for APIs whose events have names."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + DATA + json_bytes(data) + END


def line(data: Mapping[str, Any]) -> bytes:
    """A line of JSON."""
    return json_bytes(data) + b"\n"


async def until_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: it has.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return once the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response of server-sent events, or of what `media_type` says.

    It ends at once, and closes `events`, when the client goes away.
    """

    def __init__(self, events: AsyncIterator[bytes], media_type: str = EVENTS) -> None:
        headers = {"Content-Type": f"{media_type}; charset=utf-8", **HEADERS}
        self._events, self._headers = events, [(k.lower().encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        with contextlib.suppress(ClientDisconnect):
            await until_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
