"""A gateway to replicas in the process of the test, which can be killed."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import httpx2
from serving import SECONDS, SETTINGS, PacedEngine, listening, paced_service, read_until, wait_for

from foretell.serve.app import engine_app
from foretell.serve.replicas.gateway import Gateway
from foretell.serve.replicas.messages import Answer, ForwardedRequest, Head, Piece, ReplicaLostError
from foretell.serve.replicas.outlet import run_app
from foretell.serve.run import GracefulServer
from foretell.serve.service import Service
from foretell.serve.settings import ServerSettings


class ReplicasHere:
    """Services in this process. A request goes to the first one that is alive and not busy."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._apps = [engine_app(service) for service in services]
        self.alive = list(range(len(services)))
        self.seen = list[tuple[int, ForwardedRequest]]()
        """Replica and request, of all that were forwarded."""
        self._killed = dict[int, asyncio.Event]()

    async def start(self) -> None:
        for number, service in enumerate(self._services):
            self._killed[number] = asyncio.Event()
            await service.start()
            while not service.ready:
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        for service in self._services:
            await service.stop()

    async def running(self) -> int:
        return len(self.alive)

    async def metrics(self) -> Sequence[tuple[int, bytes]]:
        return [(number, self._services[number].metrics.text()) for number in self.alive]

    async def answer(self, request: ForwardedRequest) -> Answer:
        number = min(self.alive, key=lambda n: (self._services[n].jobs.live, n))
        self.seen.append((number, request))
        async with aclosing(run_app(self._apps[number], request, lambda: 0.0)) as parts:
            async for part in self._until_killed(parts, self._killed[number]):
                yield part

    async def _until_killed(self, parts: Answer, killed: asyncio.Event) -> AsyncIterator[Head | Piece]:
        death = asyncio.create_task(killed.wait())
        part: asyncio.Task[Any] | None = None
        try:
            while True:
                part = asyncio.create_task(anext(parts, None))
                await asyncio.wait({part, death}, return_when=asyncio.FIRST_COMPLETED)
                if death.done():
                    raise ReplicaLostError("the test has killed it")
                if part.result() is None:
                    return
                yield part.result()
        finally:
            for task in (death, part):
                if task is not None:
                    task.cancel()
            await asyncio.gather(death, *([] if part is None else [part]), return_exceptions=True)

    def kill(self, number: int) -> None:
        """End a replica; called in the event loop."""
        self.alive.remove(number)
        self._killed[number].set()


@dataclass
class Front:
    """A running gateway."""

    gateway: Gateway
    replicas: ReplicasHere
    server: GracefulServer
    url: str
    engines: list[list[PacedEngine]]
    services: list[Service]

    @cached_property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=SECONDS, verify=False)

    def kill(self, number: int) -> None:
        loop = self.server._loop
        assert loop is not None
        loop.call_soon_threadsafe(self.replicas.kill, number)

    def chat(self, content: str = "hello", **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        return self.http.post("/v1/chat/completions", json=body | fields)

    def start(self, body: dict[str, Any], until: bytes = b"", path: str = "/v1/chat/completions") -> socket.socket:
        """Send a request, and read until these bytes have come."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), SECONDS)
        data = json.dumps({"messages": [{"role": "user", "content": "hello"}], "temperature": 0} | body).encode()
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        read_until(connection, until)
        return connection

    def pace(self, delay: float) -> None:
        """Let every step of an engine take so long."""
        for engines in self.engines:
            engines[-1].delay = delay

    def wait_until_idle(self) -> None:
        """Until the gateway's exchanges have ended too, which is after the replicas' jobs."""
        wait_for(lambda: not self.gateway._exchanges and not any(service.jobs.live for service in self.services))


@contextmanager
def running_gateway(settings: ServerSettings = SETTINGS, replicas: int = 2, rows: int = 2) -> Iterator[Front]:
    """A gateway to so many replicas."""
    made = [paced_service(settings, rows=rows) for _ in range(replicas)]
    services = [service for service, _ in made]
    here = ReplicasHere(services)
    gateway = Gateway(replace(settings, limits=replace(settings.limits, max_num_seqs=rows)), here)
    with listening(gateway.app, gateway) as (server, url):
        front = Front(gateway, here, server, url, [engines for _, engines in made], services)
        try:
            yield front
        finally:
            front.http.close()
