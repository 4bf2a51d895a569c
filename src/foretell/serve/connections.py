"""HTTP connections with limits: on their number, on the time and size of requests, and on the time that a client takes
to read an answer.
"""

import asyncio
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from foretell.serve.settings import ServerSettings

MIN_BYTES_READ = 1 << 14
"""A client that reads fewer bytes of an answer in `Timeouts.stalled_reader` seconds, and not all, is cut off."""
FRAMING = 2
"""Most bytes on the wire per byte of a body, for its chunks and trailers."""
_GRACE_SECONDS = 5.0
"""A body that is late gets status 408 from its handler, and so much later its connection is closed at any rate."""
_PEER_SECONDS = 0.25
"""Between two looks at a client whose end is not told by reading."""
_CLOSES = getattr(select, "POLLRDHUP", 0)
"""The client sends nothing more, as `poll` says it even where bytes wait to be read; Linux alone has it."""
_CONTINUE = STATUS_LINE[100] + b"\r\n"
"""An interim answer, which clients skip; one that has left answers it by a reset of the connection."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""A socket that is closed forgets what it has not sent."""
_REFUSAL = b"connection: close\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n"


class _Phase(Enum):
    """What a connection reads."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()
    """The request is complete."""


class _Timer(Enum):
    """What a connection waits for."""

    REQUEST = auto()
    """Until the head is complete, and then until the body is."""
    WRITE = auto()
    PEER = auto()


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
    refused with status 503. A lost connection ends all its requests, those that wait behind another one too.

    A client that closes its side only (`shutdown`) gets its answers. Whether it has gone away instead is asked by an
    interim answer, and seen by looking at the socket: so, too, while nothing is read since requests wait.
    """

    config: BoundedConfig
    _timers: dict[_Timer, asyncio.TimerHandle]
    """Those that run."""
    _received = 0
    """Bytes in this phase."""
    _phase = _Phase.NOTHING
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last; `cycle` is the one that was parsed last."""
    _closes = False
    """Whether the client sends nothing more."""
    _looks = 0
    """At a client that sends nothing more."""

    def connection_made(self, transport: Any) -> None:
        """A client has connected. The transport is asyncio's or uvloop's."""
        super().connection_made(transport)
        self._timers = {}
        self._begin_head()
        self.config.idle[self] = None
        if len(self.connections) > self.config.settings.limits.connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.config.idle.pop(self, None)
        for timer in _Timer:
            self._stop_timer(timer)
        super().connection_lost(exc)
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio.Protocol has it
        """The client sends nothing more: it has left, or waits for its answers. True: the connection stays open."""
        if self.scheme == "https" or self._phase is not _Phase.NOTHING:  # TLS has no half of a connection.
            return None
        self._closes = True
        self.cycle.keep_alive = False
        self._stop_timer(_Timer.PEER)
        self._look_at_peer()
        return True

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        phase = self._timers.get(_Timer.REQUEST)
        super().data_received(data)
        if phase is not self._timers.get(_Timer.REQUEST):
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
        self._watch_unread()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        super().on_body(body)
        self._watch_unread()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._stop_timer(_Timer.REQUEST)
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
            self._stop_timer(_Timer.PEER)
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
        self._stop_timer(_Timer.WRITE)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _watch_unread(self) -> None:
        """Look at the client while nothing is read, so that its end is not told by reading."""
        if self.flow.read_paused and _Timer.PEER not in self._timers:
            self._start_timer(_Timer.PEER, _PEER_SECONDS, self._look_at_peer)

    def _look_at_peer(self) -> None:
        """End the requests of a client that has left; look again in a while.

        One that sends nothing more is asked by an interim answer, at intervals that double.
        """
        self._timers.pop(_Timer.PEER, None)
        if self._running is None or self._running.response_complete:
            return
        bound = self.transport.get_extra_info("socket")
        poll = select.poll()
        poll.register(bound.fileno(), _CLOSES)
        events = dict(poll.poll(0)).get(bound.fileno(), 0)
        if events & (select.POLLERR | select.POLLHUP):
            self._cut_off()
            return
        if self._closes or events & _CLOSES:
            self._looks += 1
            if self._looks & (self._looks - 1) == 0 and self._takes_interim_answers:
                self.transport.write(_CONTINUE)
        self._start_timer(_Timer.PEER, _PEER_SECONDS, self._look_at_peer)

    @property
    def _takes_interim_answers(self) -> bool:
        running = self._running
        return running is not None and not running.response_started and running.scope["http_version"] == "1.1"

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
        self._phase, self._received = phase, 0
        self._start_timer(_Timer.REQUEST, seconds, self._cut_off)

    def _cut_off(self) -> None:
        """Close the connection now, whatever is not sent."""
        bound = self.transport.get_extra_info("socket")
        if bound is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _watch_writing(self) -> None:
        """Close the connection in a while if the client does not read; see `MIN_BYTES_READ`."""
        size = self.transport.get_write_buffer_size()
        self._start_timer(_Timer.WRITE, self.config.settings.timeouts.stalled_reader, self._check_writing, size)

    def _check_writing(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and before - unread < MIN_BYTES_READ:
            self._cut_off()
        elif unread:
            self._watch_writing()

    def _start_timer(self, timer: _Timer, seconds: float, call: Callable[..., None], *arguments: int) -> None:
        self._stop_timer(timer)
        self._timers[timer] = self.loop.call_later(seconds, call, *arguments)

    def _stop_timer(self, timer: _Timer) -> None:
        if (running := self._timers.pop(timer, None)) is not None:
            running.cancel()
