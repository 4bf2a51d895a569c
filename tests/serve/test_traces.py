"""OpenTelemetry traces: what a local collector gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from serving import NAME, SETTINGS, running_server, wait_for

from command import expect_error

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans, self.resources = list[Any](), list[Any]()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for found in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(attributes(found.resource))
                    collector.spans += [span for scope in found.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


@contextmanager
def running_collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def attributes(of: Any) -> dict[str, Any]:
    def value(found: Any) -> Any:
        kind = found.WhichOneof("value")
        plain = getattr(found, kind)
        return [value(v) for v in plain.values] if kind == "array_value" else plain

    return {a.key: value(a.value) for a in of.attributes}


def test_every_request_is_a_span_of_its_callers_trace() -> None:
    with running_collector() as collector:
        with running_server(replace(SETTINGS, otlp_traces_endpoint=collector.url)) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
            body = {
                "messages": [{"role": "user", "content": "secret abcabc"}],
                "max_tokens": 20,
                "seed": 7,
                "top_p": 0.9,
            }
            found = server.post("/v1/chat/completions", body, headers=headers).json()
            server.post(
                "/v1/completions", {"prompt": "a", "max_tokens": 3, "n": 2}, headers={"traceparent": "nonsense"}
            )
            server.engine.delay = 0.02
            server.start({"max_tokens": 300, "stream": True}, b"content").close()
            server.wait_until_idle()
            with server.start({"max_tokens": 300, "stream": True}, b"content"):
                server.engine.broken = True
                wait_for(lambda: len(server.engines) == 2)
        wait_for(lambda: len(collector.spans) == 5)
    chat, *others = collector.spans
    assert (chat.trace_id.hex(), chat.parent_span_id.hex(), chat.name) == (TRACE, PARENT, f"chat {NAME}")
    got = attributes(chat)
    wanted = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": NAME, "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": "7", "gen_ai.request.max_tokens": 20, "foretell.request_id": "mine",
        "gen_ai.usage.input_tokens": found["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": found["usage"]["completion_tokens"],
        "gen_ai.response.finish_reasons": [found["choices"][0]["finish_reason"]], "foretell.method": "suffix",
    }  # fmt: skip
    assert {name: got[name] for name in wanted} == wanted
    assert 0 < got["gen_ai.latency.time_to_first_token"] <= got["gen_ai.latency.e2e"] < 10
    seconds = (chat.end_time_unix_nano - chat.start_time_unix_nano) / 1e9
    assert abs(seconds - got["gen_ai.latency.e2e"]) < 0.05 and [e.name for e in chat.events] == ["first token"]
    assert "secret" not in str(collector.spans)
    assert [s.name for s in others] == [f"text_completion {NAME}"] * 2 + [f"chat {NAME}"] * 2
    assert not others[0].parent_span_id
    assert attributes(others[2])["gen_ai.response.finish_reasons"] == ["abort"]
    assert others[3].status.message == "the engine failed"
    assert collector.resources[0]["service.name"] == "foretell"


def test_a_collector_that_is_not_there_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.serve.metrics.traces.EXPORT_SECONDS", 0.3)
    with running_server(replace(SETTINGS, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")) as server:
        assert server.chat().status_code == 200


def test_a_wrong_address_is_named() -> None:
    assert "no address of a collector" in expect_error("serve", "--port", "0", "--otlp-traces-endpoint", "localhost")
