"""A server with a tiny model in a thread of the test's process."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2

from command import tiny_target
from foretell.api import Model
from foretell.engine.engine import Engine
from foretell.engine.request import Update
from foretell.load import load
from foretell.serve.app import create_app
from foretell.serve.loaded import LoadedModel, Methods
from foretell.serve.run import Address, GracefulServer, Startable, server_config
from foretell.serve.service import Service
from foretell.serve.settings import EngineSettings, Limits, ServerSettings, Timeouts

NAME = "tiny"
SETTINGS = ServerSettings((NAME, "alias"), timeouts=Timeouts(restart=0.05, keep_alive_interval=5.0))
SECONDS = 10.0
"""Longest wait of a test."""
SLOW = 0.2
"""Seconds of a step: an answer outlasts what a test does meanwhile, also on a busy machine."""


class PacedEngine(Engine):
    """An engine whose steps take at least `delay` seconds, and fail while `broken`."""

    delay = 0.0
    broken = False
    steps = 0

    def step(self) -> list[Update]:
        time.sleep(self.delay)
        self.steps += 1
        if self.broken:
            raise RuntimeError("the test broke the engine")
        return super().step()


@dataclass
class Server:
    """A running server."""

    service: Service
    uvicorn: GracefulServer
    url: str = ""
    engines: list[PacedEngine] = field(default_factory=list)
    """All engines that it has made."""

    @property
    def engine(self) -> PacedEngine:
        return self.engines[-1]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @cached_property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=SECONDS, verify=False)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, content: str = "hello", **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        return self.post("/v1/chat/completions", body | fields)

    def health(self) -> int:
        return self.http.get("/health").status_code

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.engine.busy and self.service.jobs.live == 0)

    def start(self, body: dict[str, Any], until: bytes = b"", head: str = "x: y") -> socket.socket:
        """Send a chat request, and read until these bytes have come."""
        connection = socket.create_connection(self.address, SECONDS)
        data = json.dumps({"messages": [{"role": "user", "content": "hello"}], "temperature": 0} | body).encode()
        start = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{head}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(start.encode() + data)
        read_until(connection, until)
        return connection

    def signal(self) -> None:
        """A SIGTERM."""
        self.uvicorn.handle_exit(15, None)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """What a connection sends, up to these bytes."""
    found = b""
    while mark not in found:
        new = connection.recv(1 << 16)
        assert new, found
        found += new
    return found


def wait_for(condition: Any, seconds: float = SECONDS) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


def paced_service(
    settings: ServerSettings = SETTINGS,
    method: str = "suffix",
    rows: int = 4,
    path: Path | None = None,
    loaded_model: Model | None = None,
) -> tuple[Service, list[PacedEngine]]:
    """A service with a tiny model, and the engines that it has made; `path`: the directory of another model;
    `loaded_model`: serve this one.
    """
    engines = list[PacedEngine]()
    model = loaded_model or load(str(path or tiny_target()), dtype="float32")

    class PacedModel(LoadedModel):
        def make_engine(self) -> Engine:
            self.methods.clear()
            chosen = self.methods.get(method)
            engine = PacedEngine(model.runner(), chosen, rows, detokenizer=model.codec.detokenizer, prefix_caching=True)
            engines.append(engine)
            return engine

    methods = Methods(model.method, method, {"suffix", "ngram"})
    loaded = PacedModel(model, methods, EngineSettings(rows), "fp_test", {"temperature": 1.0})
    settings = replace(settings, limits=replace(settings.limits, max_num_seqs=rows))
    return Service(settings, lambda: loaded), engines


@contextmanager
def listening(
    app: Any,
    service: Startable,
    address: Address = Address(port=0),  # noqa: B008
) -> Iterator[tuple[GracefulServer, str]]:
    """A server in a thread, and its URL."""
    bound = address.bind()
    config = server_config(app, address, service.settings)
    config.timeout_graceful_shutdown = 1
    ready = threading.Event()
    server = GracefulServer(config, service, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="foretell-server")
    thread.start()
    try:
        assert ready.wait(SECONDS), server.failure
        yield server, address.url(bound)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(SECONDS)
        bound.close()
        assert not thread.is_alive()


@contextmanager
def running_server(
    settings: ServerSettings = SETTINGS,
    method: str = "suffix",
    rows: int = 4,
    path: Path | None = None,
    address: Address = Address(port=0),  # noqa: B008
    loaded_model: Model | None = None,
) -> Iterator[Server]:
    """A server of `paced_service`."""
    service, engines = paced_service(settings, method, rows, path, loaded_model)
    with listening(create_app(service), service, address) as (server, url):
        found = Server(service, server, url, engines)
        try:
            wait_for(lambda: bool(engines) and found.health() == 200)
            yield found
        finally:
            found.http.close()


__all__ = [
    "NAME", "SETTINGS", "Limits", "PacedEngine", "Server", "listening", "paced_service", "read_until",
    "running_server", "wait_for",
]  # fmt: skip
