"""The field `plan` of chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server, running_server, wait_for

from command import save_tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    with running_server(path=path) as found:
        yield found


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


def test_without_points_the_answer_is_the_plain_one(server: Server) -> None:
    plain = server.chat(max_tokens=12).json()
    found = server.chat(max_tokens=12, plan={"type": "skeleton"}).json()
    assert found["choices"] == plain["choices"]
    own = found["foretell"]
    assert own["lossless"] is False and own["method"] == "suffix" and own["plan"]["outcome"] == "plain"
    assert own["plan"]["reason"] and own["plan"]["requests"] in (3, 4)
    usage = found["usage"]
    assert usage["prompt_tokens"] > 500 and usage["completion_tokens"] > 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_ends_with_the_report(server: Server) -> None:
    plain = server.chat(max_tokens=12).json()["choices"][0]["message"]["content"]
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "plan": {"type": "skeleton", "router": "off"},
    }
    found = chunks(server.chat(max_tokens=12, **body).text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in found[:-1]) == plain
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["foretell"]["lossless"] is False and found[-1]["foretell"]["plan"]["requests"] == 2
    assert found[-1]["usage"]["completion_tokens"] > 12


def test_a_client_that_goes_away_cancels_all_requests_of_a_plan(server: Server) -> None:
    server.engine.delay = 0.01
    for stream in (True, False):
        connection = server.start({"plan": {"type": "skeleton"}, "max_tokens": 900, "stream": stream})
        wait_for(lambda: server.service.jobs.live == 2)
        connection.close()
        server.wait_until_idle()
    server.engine.delay = 0.0
    assert server.chat(max_tokens=4).status_code == 200


REFUSED: dict[str, Any] = {
    "n": 2, "logprobs": True, "prompt_logprobs": 0, "return_token_ids": True, "return_drafts": True,
    "prediction": {"type": "content", "content": "x"}, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"}, "grammar": "root ::= 'a'", "json_schema": {}, "min_tokens": 3,
    "tools": [{"type": "function", "function": {"name": "f"}}], "stop_token_ids": [3], "ignore_eos": True,
    "allowed_token_ids": [3], "echo": True, "truncate_prompt_tokens": 3,
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_does_not_go_with_a_plan_is_named(server: Server, name: str) -> None:
    response = server.chat(plan={"type": "skeleton"}, **{name: REFUSED[name]})
    assert response.status_code == 400 and response.json()["error"]["param"] == name, response.text


@pytest.mark.parametrize(
    "plan",
    ["skelton", 3, {}, {"type": "tree"}, {"type": "skeleton", "max_points": 0}, {"type": "skeleton", "x": 1}],
)
def test_a_wrong_plan_is_a_bad_request(server: Server, plan: Any) -> None:
    response = server.chat(plan=plan)
    assert response.status_code == 400 and response.json()["error"]["param"] == "plan", response.text


def test_fields_that_mean_nothing_go_with_a_plan(server: Server) -> None:
    nothing: dict[str, Any] = {
        "n": 1, "logprobs": False, "min_tokens": 0, "tools": [], "response_format": {"type": "text"}, "echo": False,
    }  # fmt: skip
    assert server.chat(plan="skeleton", **nothing).status_code == 200
