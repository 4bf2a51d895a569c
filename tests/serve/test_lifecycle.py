"""Clients that go away, engines that crash, and servers that are shut down."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from serving import SETTINGS, SLOW, Server, read_until, running_server, wait_for

from foretell.serve.loaded import LoadedModel
from foretell.serve.settings import Timeouts

LONG: dict[str, Any] = {"max_tokens": 400}
DELAY = 0.01


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server(rows=2) as found:
        yield found


def settings(**timeouts: float) -> Any:
    return replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, **timeouts))


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_client_that_leaves_frees_its_row_in_every_phase(server: Server, stream: bool) -> None:
    body, engine = LONG | {"stream": stream}, server.engine
    engine.delay = DELAY
    decoding = [server.start(body, b"content" if stream else b"") for _ in range(2)]
    wait_for(lambda: len(engine.statistics) == 2 and all(s.new_tokens > 2 for s in engine.statistics.values()))
    waiting = server.start(body)
    wait_for(lambda: len(engine.statistics) == 3)
    waiting.close()
    wait_for(lambda: len(engine.statistics) == 2)
    for connection in decoding:
        connection.close()
    server.wait_until_idle()
    engine.delay = 0.2
    reading = server.start(body | {"max_tokens": 200, "messages": [{"role": "user", "content": "a" * 300}]})
    wait_for(lambda: len(engine.statistics) == 1)
    reading.close()
    server.wait_until_idle()
    engine.delay = 0.0
    assert engine.steps < 200
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda i: server.chat().json()["choices"][0]["message"]["content"], range(4)))) == 1


def test_a_crash_ends_answers_with_an_error_and_the_engine_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "foretell.serve.worker")  # A captured traceback would hold the old engine.
    with running_server(settings(restart=1.0)) as server:
        wanted = server.chat().json()["choices"]
        server.engine.delay = DELAY
        stream = server.start(LONG | {"stream": True}, b'"content":"')
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(lambda: server.chat(**LONG))
            wait_for(lambda: server.service.jobs.live == 2)
            server.engine.broken = True
            assert b'"error"' in read_until(stream, b"data: [DONE]\n\n")
            assert whole.result().status_code == 503
        assert server.health() == 503 and server.chat().status_code == 503
        wait_for(lambda: len(server.engines) == 2 and server.health() == 200)
        assert server.chat().json()["choices"] == wanted
        stream.close()
        assert "foretell:engine_restarts_total{" in server.http.get("/metrics").text
        old = weakref.ref(server.engines.pop(0))
        gc.collect()
        assert old() is None, "the memory of the old engine is free"


def test_a_step_that_hangs_turns_health_to_503() -> None:
    with running_server(settings(heartbeat=0.05)) as server:
        server.engine.delay = 0.3
        connection = server.start({"max_tokens": 1})
        wait_for(lambda: server.health() == 503)
        wait_for(lambda: server.health() == 200)
        connection.close()


def test_a_signal_lets_answers_end() -> None:
    with running_server() as server:
        server.engine.delay = SLOW
        stream = server.start({"max_tokens": 30, "stream": True}, b'"content":"')
        server.signal()
        wait_for(lambda: server.health() == 503)
        refused = server.chat()
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        server.engine.delay = 0.0
        assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
        wait_for(lambda: not server.uvicorn.started or server.uvicorn.should_exit)
        stream.close()


@pytest.mark.parametrize("signals", [1, 2])
def test_answers_that_take_too_long_end_with_an_error_or_at_once(signals: int) -> None:
    with running_server(settings(shutdown=0.1 if signals == 1 else 60)) as server:
        server.engine.delay = DELAY
        stream = server.start(LONG | {"stream": True}, b'"content":"')
        for _ in range(signals):
            server.signal()
        if signals == 1:
            assert b"shutting down" in read_until(stream, b"data: [DONE]\n\n")
        wait_for(lambda: server.uvicorn.should_exit)
        stream.close()


def test_a_silent_stream_is_kept_open() -> None:
    with running_server(settings(keep_alive_interval=0.02)) as server:
        server.engine.delay = 0.1
        stream = server.start({"max_tokens": 2, "stream": True})
        assert b": ping\n\n" in read_until(stream, b"data: [DONE]\n\n")
        stream.close()


def test_the_thread_that_loads_the_model_ends(server: Server) -> None:
    """Else the threads that OpenMP has started for it would keep those of the engine from spinning."""
    from foretell.serve.service import Service

    loading = list[threading.Thread]()

    def load() -> LoadedModel:
        loading.append(threading.current_thread())
        return server.service.loaded

    async def run() -> None:
        service = Service(SETTINGS, load)
        await service.start()
        assert not loading[0].is_alive()
        await service.stop()

    asyncio.run(run())


def test_nothing_is_served_while_the_model_is_loaded(server: Server) -> None:
    from foretell.serve.app import create_app
    from foretell.serve.service import Service

    async def status() -> list[int]:
        app = create_app(Service(SETTINGS, lambda: server.service.loaded))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as http:
            found = [await http.get(path) for path in ("/health", "/v1/models", "/live")]
            found.append(await http.post("/v1/completions", json={"prompt": "x"}))
            assert found[0].headers["retry-after"] == "1"
            return [r.status_code for r in found]

    assert asyncio.run(status()) == [503, 503, 200, 503]
    assert Timeouts().shutdown == 30
