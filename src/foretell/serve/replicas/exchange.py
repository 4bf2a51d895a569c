"""A request that is passed to a replica, and its answer that is passed to the client."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from foretell.serve.errors import ANTHROPIC_PATH, OLLAMA_PATH, ApiError, unavailable
from foretell.serve.replicas.messages import ForwardedRequest, Head, Piece, ReplicaLostError, Replicas
from foretell.serve.sse import BLANK, DONE, PING, event, line, until_disconnected

log = logging.getLogger(__name__)
ATTEMPTS = 2
"""Replicas that a request is given to, before its answer has begun: a request that kills replicas kills no more."""
LOST = "the replica that answered has died; repeat the request"
RESPONSES_PATH = "/v1/responses"


class Exchange:
    """Passes one request to the replicas."""

    def __init__(self, replicas: Replicas, request: ForwardedRequest, send: Send) -> None:
        self._replicas, self._request, self._send = replicas, request, send
        self._head: Head | None = None
        self._sent = False
        """Whether the client was sent anything."""
        self._begun = False
        """Whether the client was sent more than comments: the answer cannot come from another replica any more."""
        self._events = 0
        self._ended_by: ApiError | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self, receive: Receive) -> None:
        """Pass the answer on until it is over, or the client goes away; then the replica is told.

        Raises:
            ApiError: before the client was sent anything.
            ClientDisconnect: the client has gone away before.
        """
        self._task = asyncio.create_task(self._answer())
        try:
            await until_disconnected(receive, self._task)
        except ClientDisconnect:
            if not self._sent:
                raise

    def end(self, error: ApiError) -> None:
        """End it with an error."""
        self._ended_by = error
        if self._task is not None:
            self._task.cancel()

    async def _answer(self) -> None:
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    await self._put(piece)
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            await self._fail(self._ended_by)
        except ApiError as error:
            await self._fail(error)

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        """The body, from another replica if the first one dies before it has begun."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with contextlib.aclosing(self._replicas.answer(self._request)) as parts:
                    async for part in parts:
                        if isinstance(part, Head):
                            self._head = part
                        else:
                            yield part
                return
            except ReplicaLostError as error:
                log.warning("a replica was lost (attempt %d): %s", attempt, error)
                if self._begun:
                    break
        raise unavailable(LOST, 1)

    async def _put(self, piece: Piece) -> None:
        self._begun = self._begun or piece.data not in (PING, BLANK)
        self._events += piece.data.count(b"\nevent: ") + piece.data.startswith(b"event: ")
        if not self._sent and self._head is not None:
            self._sent = True
            start = {"type": "http.response.start", "status": self._head.status, "headers": list(self._head.headers)}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": piece.data, "more_body": piece.more})

    async def _fail(self, error: ApiError) -> None:
        """Tell the client: by a status, or by an event of a stream that has begun."""
        if not self._sent:
            raise error
        await self._put(Piece(error_event(self._request.path, error, self._events), more=False))


def error_event(path: str, error: ApiError, number: int) -> bytes:
    """The end of a stream that an error has cut, in the API of the path. `number`: events that came before."""
    if path.startswith(ANTHROPIC_PATH):
        return event(error.anthropic_body, "error")
    if path.startswith(RESPONSES_PATH):
        detail = error.detail
        fields = {"code": detail["code"] or "server_error", "message": detail["message"], "param": None}
        return event({"type": "error", "sequence_number": number} | fields, "error")
    if path.startswith(OLLAMA_PATH):
        return line(error.ollama_body)
    return event(error.body) + DONE
