"""The gateway in front of replicas: it answers as a server of one process does, and survives its replicas."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from replicas_here import Front, running_gateway
from serving import SETTINGS, SLOW, read_until, running_server, wait_for

STREAM: dict[str, Any] = {"max_tokens": 400, "stream": True}
DELAY = 0.01
BEGUN = {
    "/v1/chat/completions": b'"content":"',
    "/v1/messages": b"content_block_delta",
    "/v1/responses": b"response.output_text.delta",
    "/api/chat": b'"content":"',
}
ERROR = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"',
    "/v1/responses": b'event: error\ndata: {"type":"error","sequence_number":',
    "/api/chat": b'\n{"error":"',
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_gateway() as found:
        yield found


def limited(**limits: int) -> Any:
    return replace(SETTINGS, limits=replace(SETTINGS.limits, **limits))


def test_answers_are_those_of_a_server_of_one_process(front: Front) -> None:
    with running_server(rows=2) as server:
        for fields in ({}, {"stream": True}, {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": True}):
            ours, theirs = front.chat(**fields), server.chat(**fields)
            assert ours.status_code == theirs.status_code == 200
            assert ours.headers["content-type"] == theirs.headers["content-type"]
            assert _choices(ours) == _choices(theirs)
        for path, body in (
            ("/v1/completions", {"prompt": "x", "n": 0}),
            ("/v1/messages", {"messages": [], "max_tokens": 0}),
            ("/tokenize", {"prompt": "abc"}),
            ("/api/chat", {"format": "xml", "messages": [{"role": "user", "content": "a"}]}),
            ("/api/pull", {}),
            ("/v1/chat/completions", {"model": "other", "messages": []}),
        ):
            ours, theirs = front.http.post(path, json=body), server.post(path, body)
            assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        for path in ("/v1/models/alias", "/nothing", "/health", "/live", "/version", "/openapi.json", "/"):
            ours, theirs = front.http.get(path), server.http.get(path)
            assert ours.status_code == theirs.status_code
            assert path == "/v1/models/alias" or ours.text == theirs.text


def _choices(answer: httpx2.Response) -> list[Any]:
    """What does not differ from answer to answer: the choices, or the text of a stream, whose pieces depend on time."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return list(answer.json()["choices"])
    chunks = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and line != "data: [DONE]"]
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    return ["".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=() if p.endswith(("chat/completions", "responses")) else pytest.mark.exhaustive)
        for p in BEGUN
    ],
)
def test_a_stream_of_a_killed_replica_ends_with_an_error_and_others_go_on(path: str) -> None:
    with running_gateway() as front:
        front.pace(DELAY)
        body = STREAM | {"input": "hello", "max_output_tokens": 400} if path == "/v1/responses" else STREAM
        cut = front.start(body, BEGUN[path], path)
        other = front.start(STREAM | {"max_tokens": 40}, BEGUN["/v1/chat/completions"])
        front.kill(0)
        told = read_until(cut, ERROR[path])
        assert b"the replica that answered has died" in told or read_until(cut, b"has died")
        assert b'"finish_reason":"length"' in read_until(other, b"data: [DONE]\n\n")
        for connection in (cut, other):
            connection.close()


def test_what_waits_at_a_killed_replica_is_answered_by_another_one() -> None:
    with running_gateway(rows=1) as front:
        wanted = front.chat().json()["choices"]
        front.pace(DELAY)
        running = [front.start(STREAM, b'"content":"') for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(front.chat, stream=stream) for stream in (False, True)]
            wait_for(lambda: len(front.replicas.seen) == 5)
            for connection in running:
                connection.close()
            front.kill(0)
            whole, stream = (future.result() for future in waiting)
        assert whole.json()["choices"] == wanted
        assert stream.text.count('"role":"assistant"') == 1 and stream.text.endswith("data: [DONE]\n\n")
        assert {number for number, _ in front.replicas.seen[3:]} == {0, 1}


def test_without_replicas_nothing_is_served_until_one_is_back() -> None:
    with running_gateway() as front:
        front.pace(DELAY)
        stream = front.start(STREAM, b'"content":"')
        front.kill(0)
        front.kill(1)
        read_until(stream, b"has died")
        wait_for(lambda: front.http.get("/health").status_code == 503)
        refused = front.chat()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert front.http.get("/live").status_code == 200 and front.http.get("/metrics").status_code == 200
        stream.close()


def test_a_request_kills_two_replicas_at_most() -> None:
    with running_gateway(replicas=3) as front:
        front.pace(0.5)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(front.chat)
            for number in (0, 1):
                wait_for(lambda number=number: len(front.replicas.seen) == number + 1)
                front.kill(number)
            assert answer.result().status_code == 503
        assert len(front.replicas.seen) == 2


def test_a_full_queue_is_told_before_the_body_is_read() -> None:
    with running_gateway(limited(queued_requests=1), rows=1) as front:
        front.pace(DELAY)
        streams = [front.start(STREAM) for _ in range(3)]
        wait_for(lambda: len(front.replicas.seen) == 3)
        refused = front.http.post("/v1/chat/completions", content=b"no JSON")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        front.wait_until_idle()
        assert front.chat().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(front: Front, stream: bool) -> None:
    front.pace(DELAY)
    connection = front.start(STREAM | {"stream": stream}, b'"content":"' if stream else b"")
    wait_for(lambda: any(service.jobs.live for service in front.services))
    connection.close()
    front.wait_until_idle()
    front.pace(0.0)
    assert all(engines[-1].steps < 300 for engines in front.engines)


def test_a_signal_lets_answers_end() -> None:
    with running_gateway() as front:
        front.pace(SLOW)
        stream = front.start(STREAM | {"max_tokens": 40}, b'"content":"')
        front.server.handle_exit(15, None)
        wait_for(lambda: front.http.get("/health").status_code == 503)
        front.pace(0.0)
        assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
        wait_for(lambda: front.server.should_exit)
        stream.close()


def test_answers_that_take_too_long_are_cut() -> None:
    with running_gateway(replace(SETTINGS, timeouts=replace(SETTINGS.timeouts, shutdown=0.1))) as front:
        front.pace(DELAY)
        stream = front.start(STREAM | {"max_tokens": 400}, b'"content":"')
        front.server.handle_exit(15, None)
        assert b"shutting down" in read_until(stream, b"data: [DONE]\n\n")
        wait_for(lambda: front.server.should_exit)
        stream.close()


def test_keys_are_asked_for_and_keep_caches_apart_and_reach_no_replica() -> None:
    with running_gateway(replace(SETTINGS, api_keys=("one", "two")), replicas=1) as front:
        assert front.chat("a" * 300).status_code == 401
        cached = []
        for key in ("one", "one", "two"):
            front.http.headers["authorization"] = f"Bearer {key}"
            usage = front.chat("a" * 300).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0 < cached[1]
        forwarded = [request for _, request in front.replicas.seen]
        assert not any(name in (b"authorization", b"x-api-key") for r in forwarded for name, _ in r.headers)
        assert forwarded[0].prefix == forwarded[1].prefix != forwarded[2].prefix


def test_metrics_say_which_replica(front: Front) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: front.chat(f"metrics {i}"), range(4)))
    lines = front.http.get("/metrics").text.splitlines()
    tokens = [line for line in lines if line.startswith("foretell:generation_tokens_total")]
    assert [f'engine="{number}"' in line for number, line in enumerate(tokens)] == [True, True]
    assert lines.count("# TYPE foretell:generation_tokens_total counter") == 1
    assert any(line.startswith('foretell:step_seconds_count{engine="1",phase="verify"}') for line in lines)
    assert any(line.startswith('foretell:http_requests_total{handler="/v1/chat/completions"') for line in lines)


def test_the_request_id_goes_to_the_replica_and_back(front: Front) -> None:
    answer = front.http.post("/tokenize", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert (b"x-request-id", b"mine") in front.replicas.seen[-1][1].headers
