"""Runs the application with uvicorn: sockets, TLS, and a shutdown that lets answers end."""

import asyncio
import errno
import logging
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from foretell.serve.connections import BoundedConfig
from foretell.serve.settings import ServerSettings

log = logging.getLogger(__name__)
CLOSE_SECONDS = 5
"""For connections to close after the last answer."""
BACKLOG = 2048
SEND_BUFFER_BYTES = 1 << 17
"""Of a connection in the system: an answer runs no further ahead of a client that reads slowly."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: a unix socket, or host and port; with TLS if a certificate is given."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: str | None = None

    def bind(self) -> socket.socket:
        """A socket that listens there; a unix socket is for the own user only.

        Raises:
            ValueError: the address is in use, not permitted, or none, or the certificate cannot be used.
        """
        self._check_certificate()
        return _bind_unix(self.uds) if self.uds is not None else _bind_tcp(self.host, self.port)

    def _check_certificate(self) -> None:
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise ValueError("--ssl-keyfile is for TLS, which needs a certificate too; give it by --ssl-certfile")
            return
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)
        except OSError as error:
            files = " and ".join(str(f) for f in (self.ssl_certfile, self.ssl_keyfile) if f is not None)
            reason = error.strerror or str(error)
            raise ValueError(
                f"--ssl-certfile: {files} cannot be used for TLS ({reason}); give a certificate and its key as PEM"
            ) from None

    def url(self, bound: socket.socket) -> str:
        """What clients call."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host, port = bound.getsockname()[:2]
        return f"http{'s' if self.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class Startable(Protocol):
    """What answers the requests of a server: a service, or a gateway to replicas."""

    settings: ServerSettings

    async def start(self) -> None:
        """Get ready to serve.

        Raises:
            ValueError: the model cannot be loaded.
        """

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones."""

    async def stop(self) -> None:
        """End what runs."""


class GracefulServer(uvicorn.Server):
    """Drains the service at the first signal, and quits at the second."""

    def __init__(self, config: uvicorn.Config, service: Startable, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks = list[asyncio.Task[None]]()
        self._draining = False
        self.failure: Exception | None = None
        """Why the model could not be loaded."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and load the model meanwhile."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._tasks.append(asyncio.create_task(self._start_service()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, and stop the engine."""
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
        await self._service.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to end."""
        if self._loop is None:  # It does not listen yet.
            self.should_exit = True
            return
        if self._draining:
            self.should_exit = self.force_exit = True
            return
        self._draining = True
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(asyncio.create_task(self._drain())))

    async def _start_service(self) -> None:
        try:
            await self._service.start()
            self._on_ready()
        except Exception as error:
            self.failure, self.should_exit = error, True

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True


def server_config(app: ASGIApp, address: Address, settings: ServerSettings) -> uvicorn.Config:
    """The settings of uvicorn."""
    return BoundedConfig(
        app,
        settings,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        ssl_certfile=address.ssl_certfile,
        ssl_keyfile=address.ssl_keyfile,
        ssl_keyfile_password=address.ssl_keyfile_password,
    )


def serve(app: ASGIApp, service: Startable, address: Address, on_listening: Callable[[str], None]) -> None:
    """Serve until a signal. `on_listening` is called with the URL once the model is ready.

    Raises:
        ValueError: the address cannot be used, or the model cannot be loaded.
    """
    with closing(address.bind()) as bound:
        config = server_config(app, address, service.settings)
        server = GracefulServer(config, service, lambda: on_listening(address.url(bound)))
        try:
            server.run(sockets=[bound])
        finally:
            if address.uds is not None:
                with suppress(OSError):
                    address.uds.unlink()
    if server.failure is not None:
        raise server.failure


def _bind_tcp(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"{port} is no port; use 0 (any free one) to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _listening(family, (host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use; choose another with --port, or 0 for any free one") from None
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


def _bind_unix(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ValueError(f"{path} exists and is no socket; choose another path with --uds")
        if _answers(path):
            raise ValueError(f"{path}: another server listens there; choose another path with --uds")
        path.unlink()
    try:
        bound = _listening(socket.AF_UNIX, str(path))
        path.chmod(0o600)
        return bound
    except OSError as error:
        raise ValueError(f"cannot listen on {path}: {error.strerror or error}") from None


def _listening(family: int, address: tuple[str, int] | str) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
