"""`foretell serve --ray` with two replicas, and the application of a config, on a cluster of Ray of this machine.

They take minutes and are run by `make ray`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from command import save_tiny_model

pytest.importorskip("ray", reason="needs foretell[ray]")
pytestmark = pytest.mark.skipif("FORETELL_TEST_RAY" not in os.environ, reason="run by `make ray`")

STARTED = 300.0
SECONDS = 120.0
"""Longest waits: for Ray to start, and for anything else."""
PROMPT = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"messages": PROMPT, "max_tokens": 20_000, "temperature": 0, "ignore_eos": True}


@dataclass
class Running:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=SECONDS)

    def chat(self, content: str = "hello", **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        with self.http as http:
            return http.post("/v1/chat/completions", json=body | fields)

    def health(self) -> int:
        try:
            return httpx2.get(self.url + "/health", timeout=5).status_code
        except httpx2.HTTPError:
            return 0

    def metric(self, name: str) -> dict[str, float]:
        """Values of a metric by replica."""
        lines = httpx2.get(self.url + "/metrics", timeout=SECONDS).text.splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith(f"foretell:{name}{{")]
        return {head.partition('engine="')[2].partition('"')[0]: float(value) for head, _, value in found}


def replica_processes() -> set[int]:
    """Processes of replicas, of all servers."""
    return {pid for pid, name in _processes() if name.startswith("ray::ServeReplica:foretell:engine")}


def _processes() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


def wait_for(condition: Any, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, so that answers take a while."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=1 << 15)


def _port() -> int:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Running]:
    port, log = _port(), model.parent / f"log-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "foretell", "serve", "--ray", "--model", model.name, "--dtype", "float32"]
    command += ["--method", "autoregressive", "--port", str(port), *options]
    with log.open("wb") as output:
        # A relative path: replicas must find what the command line means.
        process = subprocess.Popen(command, cwd=model.parent, stderr=output, stdout=output)
    running = Running(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_for(lambda: running.health() == 200 or process.poll() is not None, STARTED)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.terminate()
        process.wait(SECONDS)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with serving(model, "--replicas", "2", "--max-num-seqs", "2", "--max-num-queued-reqs", "4") as found:
        yield found


def _lines(stream: httpx2.Response) -> Iterator[dict[str, Any]]:
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _text(stream: httpx2.Response) -> str:
    return stream.read().decode()


def test_it_answers_and_uses_both_replicas(server: Running) -> None:
    assert len(replica_processes()) == 2
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: server.chat().json()["choices"], range(8)))
    assert all(answer == answers[0] for answer in answers)
    streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in _lines(server.chat(stream=True)))
    assert streamed == answers[0][0]["message"]["content"]
    assert set(server.metric("generation_tokens_total")) == {"0", "1"}
    assert all(server.metric("generation_tokens_total").values())


def test_requests_with_a_long_common_prefix_go_to_one_replica(server: Running) -> None:
    before = server.metric("prompt_tokens_total")
    cached = [
        server.chat("x" * 2000 + f" {n}").json()["usage"]["prompt_tokens_details"]["cached_tokens"] for n in range(4)
    ]
    after = server.metric("prompt_tokens_total")
    assert sum(after[n] > before[n] for n in after) == 1
    assert cached[0] < 1000 < min(cached[1:])


def test_a_client_that_leaves_frees_its_row(server: Running) -> None:
    with server.http as http, http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as stream:
        lines = _lines(stream)
        next(lines)
        assert sum(server.metric("num_requests_running").values()) == 1
    wait_for(lambda: sum(server.metric("num_requests_running").values()) == 0, 20)


def test_a_full_server_says_when_to_come_back(server: Running) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: server.chat(max_tokens=300, ignore_eos=True), range(12)))
    refused = [a for a in answers if a.status_code == 429]
    assert {a.status_code for a in answers} == {200, 429}
    assert all(int(a.headers["retry-after"]) >= 1 for a in refused)


def test_a_killed_replica_ends_its_streams_and_nothing_else(server: Running) -> None:
    wanted = server.chat().json()["choices"]
    with ThreadPoolExecutor(6) as pool, server.http as http:
        streams = [http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) for _ in range(2)]
        bodies = [context.__enter__() for context in streams]
        for body in bodies:
            assert body.status_code == 200
        before = replica_processes()
        rest = [pool.submit(_text, body) for body in bodies]
        os.kill(min(before), signal.SIGKILL)
        waiting = [pool.submit(server.chat) for _ in range(3)]
        ends = sorted(future.result() for future in rest)
        assert [("has died" in end, '"finish_reason":"length"' in end) for end in ends].count((True, False)) == 1
        assert all(end.endswith("data: [DONE]\n\n") for end in ends)
        assert all(future.result().json()["choices"] == wanted for future in waiting)
        for context in streams:
            context.__exit__(None, None, None)
    wait_for(lambda: len(replica_processes() - {min(before)}) == 2)
    wait_for(lambda: len(server.metric("generation_tokens_total")) == 2)
    assert server.chat().json()["choices"] == wanted


def test_a_signal_lets_answers_end_and_ends_ray(model: Path) -> None:
    others = replica_processes()
    with serving(model, "--replicas", "1") as server:
        pids = replica_processes() - others
        assert len(pids) == 1
        with (
            server.http as http,
            http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True, "max_tokens": 3000}) as stream,
        ):
            lines = _lines(stream)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.health() == 503)
            last = [c for c in lines if c["choices"]][-1]
            assert last["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(SECONDS) == 0
        wait_for(lambda: not pids & replica_processes())


def test_a_model_that_a_replica_cannot_load_is_one_sentence(model: Path) -> None:
    (model.parent / "broken").mkdir()
    command = [sys.executable, "-m", "foretell", "serve", "--ray", "--model", "broken", "--port", "0"]
    done = subprocess.run(command, cwd=model.parent, capture_output=True, text=True, timeout=STARTED)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("foretell: ") and "Traceback" not in done.stderr


def test_the_application_of_a_config_serves(model: Path) -> None:
    port = _port()
    script = model.parent / "config.py"
    script.write_text(CONFIG.format(model=str(model), port=port))
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdin=subprocess.PIPE) as process:
        server = Running(process, f"http://127.0.0.1:{port}", script)
        wait_for(lambda: server.health() == 200 or process.poll() is not None, STARTED)
        assert server.chat().json()["object"] == "chat.completion"
        chunks = list(_lines(server.chat(stream=True)))
        assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        assert server.chat(temperature=-1).status_code == 400
        process.communicate(b"\n", timeout=SECONDS)
    assert process.returncode == 0


CONFIG = """
import ray
from ray import serve
from foretell.cli.serve_ray import application

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={{"port": {port}}})
serve.run(application({{"model": "{model}", "dtype": "float32", "replicas": 1}}), name="foretell")
input()
serve.shutdown()
"""
