"""HTTP connections with limits: on their number, on the time and size of requests, and on the time that a client takes
to read an answer.
"""

import asyncio
import socket
import struct
from collections import OrderedDict
from enum import Enum, auto
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from foretell.serve.settings import ServerSettings

MIN_BYTES_READ = 1 << 14
"""A client that reads fewer bytes of an answer in `Timeouts.stalled_reader` seconds, and not all, is cut off."""
FRAMING = 2
"""Most bytes on the wire per byte of a body, for its chunks and trailers."""
_GRACE_SECONDS = 5.0
"""A body that is late gets status 408 from its handler, and so much later its connection is closed at any rate."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""A socket that is closed forgets what it has not sent."""
_REFUSAL = b"connection: close\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n"


class _Phase(Enum):
    """What a connection reads."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()
    """The request is complete."""


class BoundedConfig(uvicorn.Config):
    """The configuration of a server with bounded connections."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, **options: Any) -> None:
        super().__init__(app, http=BoundedHttpProtocol, **options)
        self.settings = settings
        self.idle = OrderedDict[BoundedHttpProtocol, None]()
        """Connections without a complete request that is being answered; the one that is longest so first."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections that send a request too slowly or without an end, or do not read their answer.

    Above the greatest number of connections the one that is idle longest is closed; where none is idle, the new one is
    refused with status 503.
    """

    config: BoundedConfig
    _request_timer: asyncio.TimerHandle | None = None
    """Runs until the head is complete, and then until the body is."""
    _write_timer: asyncio.TimerHandle | None = None
    _received = 0
    """Bytes in this phase."""
    _phase = _Phase.NOTHING

    def connection_made(self, transport: Any) -> None:
        """A client has connected. The transport is asyncio's or uvloop's."""
        super().connection_made(transport)
        self._begin_head()
        self.config.idle[self] = None
        if len(self.connections) > self.config.settings.limits.connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.config.idle.pop(self, None)
        self._stop_request_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        phase = self._request_timer
        super().data_received(data)
        if phase is not self._request_timer:
            return
        limits = self.config.settings.limits
        self._received += len(data)
        most = {_Phase.HEAD: limits.head_bytes, _Phase.BODY: FRAMING * limits.body_bytes}.get(self._phase)
        if most is not None and self._received > most:
            self._cut_off()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if self._phase is _Phase.NOTHING:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """The head is complete.

        Raises:
            ValueError: it is too large; the parser answers with status 400.
        """
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > (
            self.config.settings.limits.head_bytes
        ):
            raise ValueError("the head of a request is too large")
        self._begin(_Phase.BODY, self.config.settings.limits.body_seconds + _GRACE_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._stop_request_timer()
        self._phase = _Phase.NOTHING
        super().on_message_complete()
        if self.cycle.response_complete:
            self._begin_head()
        else:
            self.config.idle.pop(self, None)

    def on_response_complete(self) -> None:
        """The answer is written, as far as the server is concerned."""
        super().on_response_complete()
        if self.cycle.response_complete:  # There is no further request in the pipeline.
            self.config.idle[self] = None
            self.config.idle.move_to_end(self)
            if self._phase is _Phase.NOTHING:
                self._begin_head()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is written."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client has read enough for more to be written."""
        super().resume_writing()
        self._stop_write_timer()

    def _make_room(self) -> None:
        oldest = next(iter(self.config.idle))
        del self.config.idle[oldest]
        if oldest is self:
            self.transport.write(STATUS_LINE[503] + _REFUSAL)
            self.transport.close()
        else:
            oldest._cut_off()

    def _begin_head(self) -> None:
        """Wait for a head; its time runs from the connection or from the last answer on."""
        self._begin(_Phase.HEAD, self.config.settings.timeouts.head)

    def _begin(self, phase: _Phase, seconds: float) -> None:
        self._stop_request_timer()
        self._phase, self._received = phase, 0
        self._request_timer = self.loop.call_later(seconds, self._cut_off)

    def _cut_off(self) -> None:
        """Close the connection now, whatever is not sent."""
        bound = self.transport.get_extra_info("socket")
        if bound is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _watch_writing(self) -> None:
        """Close the connection in a while if the client does not read; see `MIN_BYTES_READ`."""
        self._stop_write_timer()
        size = self.transport.get_write_buffer_size()
        seconds = self.config.settings.timeouts.stalled_reader
        self._write_timer = self.loop.call_later(seconds, self._check_writing, size)

    def _check_writing(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and before - unread < MIN_BYTES_READ:
            self._cut_off()
        elif unread:
            self._watch_writing()

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
