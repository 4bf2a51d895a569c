"""Attacks by connections: slow heads and bodies, idle and many connections, readers that stop, odd requests."""

import asyncio
import json
import logging
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from serving import SECONDS, SETTINGS, Server, read_until, running_server, wait_for

from foretell.serve.connections import MIN_BYTES_READ
from foretell.serve.jobs import MAX_PENDING

LARGE: dict[str, Any] = {"max_tokens": 450, "logprobs": True, "top_logprobs": 20, "speculative": {"max_drafts": 0}}
"""An answer of about a megabyte."""


def settings(timeouts: dict[str, float] | None = None, **limits: Any) -> Any:
    return replace(
        SETTINGS,
        timeouts=replace(SETTINGS.timeouts, **(timeouts or {})),
        limits=replace(SETTINGS.limits, **limits),
    )


def closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection; what it sends before is read."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def connect(server: Server, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(SECONDS)
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(server.address)
    return connection


def send_chat(server: Server, body: dict[str, Any]) -> socket.socket:
    """A client with a small window asks and reads nothing."""
    connection = connect(server, receive_buffer=4096)
    data = json.dumps({"messages": [{"role": "user", "content": "hello"}], "temperature": 0} | body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /live HTTP/1.1\r\nX: y", b"\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"],
    ids=["nothing", "head", "line ends", "body"],
)
def test_slow_requests_are_ended(sent: bytes) -> None:
    with running_server(settings({"head": 0.2}, body_seconds=0.2)) as server, connect(server) as connection:
        connection.sendall(sent)
        assert closed(connection)


def test_a_body_that_is_announced_too_large_is_not_awaited(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        assert b"413 " in read_until(connection, b"\r\n") and closed(connection)


def test_slow_bodies_get_408(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert b"408 Request Timeout" in read_until(connection, b"\r\n")


def test_blank_lines_do_not_keep_a_connection() -> None:
    with running_server(settings({"head": 0.3})) as server, connect(server) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(connection, b"ok")
        started = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - started < SECONDS:
                connection.sendall(b"\r\n")
                time.sleep(0.02)
        assert time.monotonic() - started < SECONDS


def test_idle_connections_make_room_for_new_ones() -> None:
    most = 60
    with running_server(settings(connections=most)) as server, ExitStack() as stack:
        stream = server.start({"max_tokens": 400, "stream": True}, b"content")
        for _ in range(10 * most):
            stack.enter_context(connect(server))
        assert server.health() == 200 and server.chat().status_code == 200
        assert len(server.uvicorn.server_state.connections) <= most + 2
        assert b"[DONE]" in read_until(stream, b"[DONE]"), "an answer in progress is not cut off"
        stream.close()


def test_a_server_whose_connections_are_all_busy_refuses_new_ones() -> None:
    with running_server(settings(connections=2), rows=2) as server:
        server.engine.delay = 0.02
        server.http.close()
        busy = [server.start({"max_tokens": 400, "stream": True}, b"content") for _ in range(2)]
        with connect(server) as connection:
            assert b"503 Service Unavailable" in read_until(connection, b"\r\n") and closed(connection)
        for stream in busy:
            stream.close()
        del server.__dict__["http"]


def test_thousands_of_idle_connections_leave_the_server_responsive() -> None:
    """As many as this process may open; both ends of a connection are files of it."""
    count = min(2000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2)
    with running_server() as server, ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(server))
        wait_for(lambda: len(server.uvicorn.server_state.connections) >= count)
        assert server.chat().status_code == 200


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(settings({"stalled_reader": 0.5}, body_seconds=0.2)) as found:
        yield found


def test_a_slow_reader_pauses_its_request_and_goes_on(server: Server) -> None:
    expected = server.chat(max_tokens=450).json()["choices"][0]["message"]["content"]
    with running_server() as patient, send_chat(patient, LARGE | {"stream": True}) as connection:
        wait_for(lambda: patient.service.jobs.paused == 1)
        wait_for(lambda: not patient.engine.busy)
        (statistics,) = patient.engine.statistics.values()
        assert MAX_PENDING < statistics.new_tokens < 450
        assert patient.engine.load == (0, 0), "its row is free"
        assert patient.chat().status_code == 200
        events = read_until(connection, b"[DONE]").decode()
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == expected


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_reader_that_stops_is_cut_off_and_its_request_cancelled(server: Server, stream: bool) -> None:
    with send_chat(server, LARGE | {"stream": stream}):
        wait_for(lambda: server.service.jobs.live > 0)
        server.wait_until_idle()
        wait_for(lambda: not server.uvicorn.server_state.connections)
    assert not server.engine.statistics and server.chat().status_code == 200


@pytest.mark.exhaustive
def test_a_reader_that_takes_a_little_is_cut_off(server: Server) -> None:
    with send_chat(server, LARGE) as connection:
        got = len(connection.recv(64))
        with suppress(ConnectionError):
            while got < 20 * MIN_BYTES_READ and (new := connection.recv(64)):
                got += len(new)
                time.sleep(0.005)
        assert got < 20 * MIN_BYTES_READ


def status_of(server: Server, request: bytes) -> int:
    """Status of a raw request; 0: the connection was closed without an answer."""
    with connect(server) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR) if not request else None
        found = b""
        with suppress(ConnectionError):
            while b"\r\n" not in found and (new := connection.recv(1 << 16)):
                found += new
    return int(found.split(b" ")[1]) if found else 0


KEYED = ("/v1/models", "/metrics", "/openapi.json", "/nothing")
PATHS = (
    "//v1/models", "/health/../v1/models", "/health/..%2fv1/models", "/health%2f..%2fv1%2fmodels", "/v1/models/",
    "/%76%31/models", "/v1/models%00", "/V1/MODELS", "/live;/v1/models", "/health?x=/v1/models#/v1/models",
    "http://127.0.0.1/v1/models", "/./v1/models", "/v1/models/../../../etc/passwd", "/\\v1\\models", "/v1/models?key=a",
    "/" + "a" * 60_000,
)  # fmt: skip


def test_no_path_goes_around_the_key() -> None:
    with running_server(replace(SETTINGS, api_keys=("the-key",))) as server:
        for path in (*KEYED, *PATHS):
            for method in ("GET", "POST", "HEAD", "PUT"):
                found = status_of(server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert found in ((200, 405) if path.startswith("/health?") else (400, 401)), (method, path, found)
            head = "Host: localhost\r\nX-Original-URL: /health\r\nX-Forwarded-For: 127.0.0.1\r\nX-HTTP-Method: OPTIONS"
            assert status_of(server, f"GET {path} HTTP/1.1\r\n{head}\r\n\r\n".encode()) != 200 or "health" in path


ODD = {
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunks": b"POST /live HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"POST /live HTTP/1.1\r\nTransfer-Encoding: chunked, x\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /live HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "a folded header": b"GET /live HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
    "a bare line end": b"GET /live HTTP/1.1\nX: a\n\n",
    "a blank before the colon": b"GET /live HTTP/1.1\r\nHost : a\r\n\r\n",
    "a byte of zero": b"GET /live HTTP/1.1\r\nX: a\0b\r\n\r\n",
    "a path beyond ASCII": b"GET /\xff HTTP/1.1\r\n\r\n",
    "no method": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a long head": b"GET /live HTTP/1.1\r\n" + b"X: y\r\n" * 30_000 + b"\r\n",
    "a long header": b"GET /live HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_get_400_or_nothing(server: Server, name: str) -> None:
    assert status_of(server, ODD[name]) in (0, 400, 404, 405)
    assert server.health() == 200


def test_a_large_trailer_or_an_endless_body_is_ended(server: Server) -> None:
    """A body that nobody reads, and headers after it, are bounded too."""
    limits = replace(server.service.settings.limits, body_bytes=100_000, body_seconds=60.0)
    with running_server(replace(SETTINGS, limits=limits)) as small:
        for start in (b"0\r\nX: ", b"FFFFFF\r\n"):
            with connect(small) as connection, suppress(ConnectionError):
                connection.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + start)
                for _ in range(2000):
                    connection.sendall(b"y" * 10_000)
                pytest.fail("20 MB were taken")


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n" * 20 + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_until(connection, b'"version"').count(b'{"status":"ok"}') == 20


BEHIND = {
    "nothing": b"",
    "a request": b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n",
    "many requests": b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n" * 5000,
    "a large body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + b" " * 300_000,
    "half a head": b"GET /live HTTP/1.1\r\nHo",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n" + b" " * 200_000,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_lost_connection_ends_all_its_requests(
    paced: Server, stream: bool, behind: str, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever waits behind the one that is answered, and though a whole answer writes nothing until its end."""
    connection = paced.start({"max_tokens": 400, "stream": stream, "ignore_eos": True})
    wait_for(lambda: paced.engine.busy)
    connection.sendall(BEHIND[behind])
    time.sleep(0.1)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    before = paced.engine.steps
    paced.wait_until_idle()
    assert paced.engine.steps - before < 100
    wait_for(lambda: not paced.uvicorn.server_state.connections and not paced.uvicorn.server_state.tasks)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_side_gets_all_its_answers(paced: Server, stream: bool) -> None:
    """As Node's servers and Go's answer it; HTTP allows it (RFC 9112, 9.6)."""
    with paced.start({"max_tokens": 30, "stream": stream, "ignore_eos": True}) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        got = b""
        while new := connection.recv(1 << 16):
            got += new
    assert (b"[DONE]" if stream else b'"finish_reason":"length"') in got
    assert got.rstrip().endswith(b"}") and b'"version"' in got and b"connection: close" in got
    if not stream:
        assert got.startswith(b"HTTP/1.1 100 ")


def test_a_client_that_closes_its_side_and_then_leaves_is_noticed(paced: Server) -> None:
    connection = paced.start({"max_tokens": 400, "ignore_eos": True})
    wait_for(lambda: paced.engine.busy)
    connection.shutdown(socket.SHUT_WR)
    assert b" 100 " in read_until(connection, b"\r\n\r\n")
    connection.close()
    before = paced.engine.steps
    paced.wait_until_idle()
    assert paced.engine.steps - before < 100 and paced.chat().status_code == 200


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """Its answers of 400 tokens take eight seconds."""
    with running_server(method="ngram") as found:
        found.engine.delay = 0.02
        yield found


def test_a_client_that_speaks_first_and_leaves_costs_nothing(server: Server) -> None:
    async def flood() -> None:
        for _ in range(200):
            _, writer = await asyncio.open_connection(*server.address)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            writer.close()

    asyncio.run(flood())
    wait_for(lambda: not server.uvicorn.server_state.connections)
    assert server.chat().status_code == 200
