"""Limits, keys and addresses."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from serving import SETTINGS, Limits, Server, running_server, wait_for

from command import ENVIRONMENT, expect_error, tiny_target
from foretell.serve.auth import read_keys
from foretell.serve.run import Address

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = Limits(body_bytes=2000, body_seconds=0.3, queued_requests=1, queued_tokens=400, per_key=3, messages=3)
    with running_server(replace(SETTINGS, api_keys=KEYS, limits=limits, cors_origins=("https://a.b",)), rows=1) as s:
        s.http.headers["Authorization"] = f"Bearer {KEYS[1]}"
        yield s


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer x"}, {"Authorization": KEYS[0]}, {"x-api-key": "x"}])
def test_a_key_is_needed(server: Server, given: dict[str, str]) -> None:
    with httpx2.Client(base_url=server.url, verify=False, headers=given) as http:
        for path in ("/v1/models", "/nothing", "/openapi.json"):
            refused = http.get(path)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/health").status_code == http.get("/live").status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": KEYS[0], "Authorization": ""}).status_code == 200


def test_keys_come_from_three_places(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\nc\n\nd\n")
    assert read_keys(["a", "b"], file, "d, e") == ("a", "b", "c", "d", "e")
    file.write_text("# none\n")
    for given, path in ((["a b"], None), ([""], None), ([], file)):
        with pytest.raises(ValueError, match="key"):
            read_keys(given, path, "")


def test_bodies_are_bounded_in_size_and_time(server: Server) -> None:
    assert server.chat("a" * 3000).status_code == 413

    async def slow() -> int:
        async def parts() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(0.6)

        async with httpx2.AsyncClient(base_url=server.url, headers=server.http.headers, verify=False) as http:
            return (await http.post("/v1/completions", content=parts())).status_code

    assert asyncio.run(slow()) == 408
    many = [{"role": "user", "content": "x"}] * 4
    assert server.post("/v1/chat/completions", {"messages": many}).status_code == 400


def test_a_full_queue_and_a_busy_key_give_429(server: Server) -> None:
    server.engine.delay = 0.02
    head = f"x-api-key: {KEYS[0]}"
    running = [server.start({"max_tokens": 300, "stream": True}, head=head) for _ in range(2)]
    wait_for(lambda: server.service.jobs.live == 2)
    full = server.chat()
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    running.append(server.start({"max_tokens": 300, "stream": True}, head=head))
    with httpx2.Client(base_url=server.url, verify=False, headers={"x-api-key": KEYS[0]}) as http:
        wait_for(lambda: http.get("/v1/models").status_code in (200, 429))
    for connection in running:
        connection.close()
    server.wait_until_idle()
    server.engine.delay = 0.0
    assert server.chat().status_code == 200


def test_waiting_tokens_are_bounded(server: Server) -> None:
    server.engine.delay = 0.1
    first = server.start(
        {"max_tokens": 3, "messages": [{"role": "user", "content": "a" * 300}]}, head=f"x-api-key: {KEYS[0]}"
    )
    wait_for(lambda: server.service.jobs.live == 1)
    assert server.chat("b" * 200).status_code == 429
    first.close()
    server.engine.delay = 0.0
    server.wait_until_idle()


def test_browsers_of_other_origins_are_refused(server: Server) -> None:
    def allowed(origin: str) -> str | None:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return server.http.options("/v1/chat/completions", headers=headers).headers.get("access-control-allow-origin")

    assert allowed("https://a.b") == "https://a.b" and allowed("https://evil") is None


def test_request_ids_come_back(server: Server) -> None:
    for given, kept in (("bench-1", True), ("x" * 200, False)):
        found = server.http.get("/live", headers={"X-Request-Id": given}).headers["x-request-id"]
        assert (found == given) is kept and found


def test_addresses(tmp_path: Path) -> None:
    address = Address(uds=tmp_path / "s")
    with address.bind() as bound:
        assert address.url(bound) == f"unix:{tmp_path / 's'}" and (tmp_path / "s").stat().st_mode & 0o77 == 0
        with pytest.raises(ValueError, match="another server"):
            address.bind()
    address.bind().close()
    (tmp_path / "f").write_text("")
    with pytest.raises(ValueError, match="no socket"):
        Address(uds=tmp_path / "f").bind()
    with Address(port=0).bind() as bound:
        port = bound.getsockname()[1]
        assert "in use" in expect_error("serve", "--port", str(port))
    assert "no port" in expect_error("serve", "--port", "70000")
    assert "generation_config.json" in expect_error("serve", "--port", "0", "--generation-config", tmp_path)


def test_the_command_serves_on_a_socket_until_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    options = ["--uds", str(path), "--model", str(tiny_target()), "--dtype", "float32"]
    command = [sys.executable, "-m", "foretell", "serve", *options]
    with subprocess.Popen(command, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None and "answers on unix:" in process.stderr.readline()
            with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://x") as http:
                found = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}).json()
                assert found["system_fingerprint"].startswith("fp_") and found["usage"]["completion_tokens"] == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0 and not path.exists()
        finally:
            process.kill()
