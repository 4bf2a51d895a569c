"""What gateway and replicas say to each other."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from foretell.serve.replicas.prefixes import Prefix

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request whose body is complete."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    prefix: Prefix
    """What the router compares with earlier requests."""
    api_key: int | None
    """Number of the client's API key, which keeps its cached prefixes apart; None: no key was asked for."""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer; its body follows."""

    status: int
    headers: Headers


@dataclass(frozen=True)
class Piece:
    """A part of the body. `more`: whether another follows."""

    data: bytes
    more: bool


Answer = AsyncGenerator[Head | Piece, None]
"""A `Head`, then the pieces of the body."""


class ReplicaLostError(Exception):
    """A replica has died, or cannot be reached, before its answer was over."""


class Replicas(Protocol):
    """The replicas as the gateway sees them."""

    async def start(self) -> None:
        """Start them.

        Raises:
            ValueError: the model cannot be loaded.
        """

    async def stop(self) -> None:
        """End them."""

    def answer(self, request: ForwardedRequest) -> Answer:
        """Let a replica answer; closing the generator cancels the request.

        Raises:
            ReplicaLostError: the replica has died.
            ApiError: too many requests wait, or the replica has failed.
        """

    async def running(self) -> int:
        """Replicas that can answer now."""

    async def metrics(self) -> Sequence[tuple[int, bytes]]:
        """Metrics of every replica in Prometheus' text format, with the replica's number."""
