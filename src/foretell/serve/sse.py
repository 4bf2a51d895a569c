"""Server-sent events and lines of JSON, and a response that streams them while it watches for the client to go away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

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


async def disconnected(receive: Receive) -> None:
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
        watcher = asyncio.create_task(disconnected(receive))
        writer = asyncio.create_task(self._write(send))
        try:
            await asyncio.wait({watcher, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (watcher, writer):
                task.cancel()
            await asyncio.gather(watcher, writer, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
