"""Every field of a request: what is refused, under which name, and what is only warned about."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as found:
        yield found


BAD: dict[str, Any] = {
    "temperature": -1, "top_p": 0, "top_k": 1.5, "min_p": 2, "presence_penalty": 3, "frequency_penalty": "x",
    "repetition_penalty": 0, "n": 0, "seed": 2**70, "stop": [""], "max_tokens": 0, "max_completion_tokens": 9999,
    "logit_bias": {"a": 1}, "top_logprobs": 21, "messages": [], "messages.0.role": [{"role": "king", "content": "x"}],
    "messages.0.content": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "stream_options": {"include_usage": True}, "chat_template": "x", "stream": "yes",
    "response_format.type": {"type": "xml"}, "truncate_prompt_tokens": -2, "allowed_token_ids": "abc",
    "speculative.max_drafts": {"max_drafts": -1}, "stream_interval": 0, "logprob_token_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named(server: Server, name: str) -> None:
    key, value = name.split(".")[0], BAD[name]
    response = server.chat(**{key: value}, logprobs=key == "top_logprobs")
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == name and error["type"] == "invalid_request_error" and set(error) == {
        "message", "type", "param", "code",
    }  # fmt: skip


def test_fields_that_change_nothing_here_are_accepted(server: Server) -> None:
    ignored: dict[str, Any] = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": "low",
        "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "ignore_eos": False, "min_tokens": 0,
        "prediction": {"type": "content", "content": "x"}, "stream": None, "skip_special_tokens": True,
        "cache_prompt": True, "id_slot": 0, "thinking_token_budget": 8, "stream_interval": 3,
    }  # fmt: skip
    response = server.chat(**ignored)
    assert response.status_code == 200 and "x-foretell-warning" not in response.headers
    assert response.json()["choices"] == server.chat().json()["choices"]


@pytest.mark.parametrize("drafts", [0, 8])
def test_log_probabilities_of_given_tokens_are_those_of_the_likeliest_ones(server: Server, drafts: int) -> None:
    fields: dict[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True}
    fields["speculative"] = {"max_drafts": drafts}
    places = server.chat(**fields, top_logprobs=20).json()["choices"][0]["logprobs"]["content"]
    for number in (0, 5):
        wanted = [int(top["token"].removeprefix("token_id:")) for top in places[number]["top_logprobs"][3::-1]]
        answer = server.chat(**fields, logprob_token_ids=wanted).json()
        assert "choices" in answer, answer
        found = answer["choices"][0]["logprobs"]["content"]
        assert found[number]["top_logprobs"] == places[number]["top_logprobs"][:4]
        assert [p["logprob"] for p in found] == [p["logprob"] for p in places]
    refused = server.chat(**fields, logprob_token_ids=[10**6]).json()["error"]
    assert refused["param"] == "logprob_token_ids" and "vocabulary" in refused["message"]


def test_unknown_fields_are_named_in_a_header(server: Server) -> None:
    response = server.chat("hello", foo=1, **{"b\nad": 2})
    assert response.headers["x-foretell-warning"] == "unknown fields were ignored: foo, b?ad"
    response = server.chat(
        "hello", speculative={"tokens": 3}, stream_options={"include_usage": True, "x": 1}, stream=True
    )
    assert sorted(response.headers["x-foretell-warning"].split(": ")[1].split(", ")) == [
        "speculative.tokens",
        "stream_options.x",
    ]


def test_a_value_that_is_no_object_is_refused_without_names_of_classes(server: Server) -> None:
    error = server.chat("hello", speculative="ngram").json()["error"]
    assert error["message"] == "speculative: input should be an object, found 'ngram'"


def test_an_error_never_echoes_the_body(server: Server) -> None:
    for body in (
        {"messages": [{"role": "user", "content": 7}] * 3000},
        {"messages": "x" * 100_000},
        {"messages": [{"role": "x" * 100_000, "content": ""}]},
        {"messages": [{"role": "user", "content": "x"}], "model": "m" * 500},
        {"messages": [{"role": "user", "content": "x"}], "stop": ["s"] * 100_000},
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x" * 100_000: 1}},
    ):
        response = server.post("/v1/chat/completions", body)
        assert response.status_code in (400, 404) and len(response.content) < 1000


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": NaN}', b'{"messages": "\\ud800"}']
)
def test_a_body_that_is_no_object(server: Server, data: bytes) -> None:
    response = server.http.post("/v1/chat/completions", content=data)
    assert response.status_code == 400 and len(response.content) < 1000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": [300]}, "prompt"), ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"), ({"prompt": "a", "n": 1000}, "n"),
        ({"prompt": ["a"] * 10, "n": 10}, "n"), ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": "a", "max_tokens": 600}, "max_tokens"),
    ],
)  # fmt: skip
def test_a_bad_completion_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    response = server.post("/v1/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_prompt_is_truncated_on_the_left(server: Server) -> None:
    long, short = ({"prompt": p, "max_tokens": 3, "temperature": 0} for p in ("xyzabc", "abc"))
    texts = [server.post("/v1/completions", b).json()["choices"] for b in (long | {"truncate_prompt_tokens": 3}, short)]
    assert texts[0] == texts[1]


def test_unknown_paths_and_methods_have_the_same_shape(server: Server) -> None:
    for response in (server.http.get("/v2"), server.http.get("/v1/completions"), server.http.get("/v1/../etc")):
        assert response.status_code in (404, 405) and response.json()["error"]["param"] is None
