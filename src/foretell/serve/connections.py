"""HTTP connections whose heads must arrive in time and in few bytes."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 30.0
"""Longest time for the head of a request, counted from the connection or from the first byte of a further request."""
HEAD_BYTES = 1 << 16


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections that send nothing, or the head of a request too slowly or without an end."""

    head_seconds, head_bytes = HEAD_SECONDS, HEAD_BYTES
    _head_timer: asyncio.TimerHandle | None = None
    _received = 0
    """Bytes since the head began."""

    def connection_made(self, transport: Any) -> None:
        """A client has connected. The transport is asyncio's or uvloop's."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        super().data_received(data)
        if self._head_timer is not None:
            self._received += len(data)
            if self._received > self.head_bytes:
                self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        if self._head_timer is None:
            self._received = 0
            self._head_timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
