"""Every field of a request: what is refused, under which name, and what is only warned about."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import Server

from foretell.serve.defaults import read_defaults

BAD: dict[str, Any] = {
    "temperature": -1, "top_p": 0, "top_k": 1.5, "min_p": 2, "presence_penalty": 3, "frequency_penalty": "x",
    "repetition_penalty": 0, "n": 0, "seed": 2**70, "stop": [""], "max_tokens": 0, "max_completion_tokens": 0,
    "logit_bias": {"a": 1}, "top_logprobs": 21, "messages": [], "messages.0.role": [{"role": "king", "content": "x"}],
    "messages.0.content": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
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
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": None,
        "verbosity": "medium", "prompt_cache_key": "k", "safety_identifier": "s", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "ignore_eos": False, "min_tokens": 0,
        "prediction": {"type": "content", "content": "x"}, "stream": None, "skip_special_tokens": True,
        "cache_prompt": True, "id_slot": 0, "stream_interval": 3, "modalities": ["text"], "refusal": None,
    }  # fmt: skip
    response = server.chat(**ignored)
    assert response.status_code == 200 and "x-foretell-warning" not in response.headers
    assert response.json()["choices"] == server.chat().json()["choices"]


def test_what_has_no_effect_is_named(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    asked: dict[str, Any] = {
        "store": True, "reasoning_effort": "low", "verbosity": "low", "modalities": ["text", "audio"],
        "thinking_token_budget": 8,
    }  # fmt: skip
    for _ in range(3):
        response = server.chat(**asked)
        warned = response.headers["x-foretell-warning"].removeprefix("fields have no effect on this server: ")
        assert sorted(warned.split(", ")) == sorted(asked)
    logged = [r.fields["warning"] for r in caplog.records if hasattr(r, "fields") and "warning" in r.fields]
    assert len(logged) == 1 and "verbosity" in logged[0]


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


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "typical_p": 0.5}, "typical_p"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "x": 1, "y": None}] * 2,
                                  "max_tokens": 1, "tools": [{"function": {"name": "f", "z": 1}}]},
         "messages.x, tools.function.z"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}],
                           "max_output_tokens": 1, "text": {"speed": 1}}, "text.speed, input.content.x"),
        ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "a", "x": 1}]}, "input.x"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}],
                          "max_tokens": 1, "y": 2}, "y, messages.content.x"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.x"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [1], "x": 1}, "x"),
    ],
)  # fmt: skip
def test_unknown_fields_are_named_by_every_endpoint(server: Server, path: str, body: Any, names: str) -> None:
    response = server.post(path, body)
    assert response.headers["x-foretell-warning"] == f"unknown fields were ignored: {names}", response.text


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [True, False])
def test_more_tokens_than_the_context_holds_are_cut_and_named(server: Server, name: str, stream: bool) -> None:
    """As agents ask: for 32,000 tokens of any model."""
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    fields: Any = {"max_tokens": None, "ignore_eos": True, "stream": stream, name: 32000}
    response = server.chat(**fields, stream_options={"include_usage": True} if stream else None)
    warning = response.headers["x-foretell-warning"]
    assert warning.startswith(f"32000 new tokens were asked for, and the context of {context} has room for ")
    room = int(warning.rpartition(" ")[2])
    chunks = [line for line in response.text.splitlines() if "prompt_tokens" in line]
    usage = json.loads(chunks[-1].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == room == context - usage["prompt_tokens"]


def test_the_defaults_of_a_model_bound_no_request_that_asks_for_all(server: Server) -> None:
    """`n_predict` -1 is all that the context holds, whatever `generation_config.json` says."""
    loaded: Any = server.service.loaded
    server.service._loaded = replace(loaded, defaults={**loaded.defaults, "max_new_tokens": 5})
    try:
        lengths = {
            asked: server.post("/v1/completions", {"prompt": "a" * 400, "ignore_eos": True, "n_predict": asked}).json()
            for asked in (-1, 30)
        }
        chat = server.chat(max_tokens=None, ignore_eos=True).json()
    finally:
        server.service._loaded = loaded
    assert lengths[30]["usage"]["completion_tokens"] == 30 and chat["usage"]["completion_tokens"] == 5
    usage = lengths[-1]["usage"]
    assert usage["total_tokens"] == loaded.model.config.context


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"max_new_tokens": 0}', "max_new_tokens must be at least 1, found 0"), ('{"top_p": 2.0}', "top_p")],
)
def test_defaults_that_no_request_can_have_are_refused_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_defaults("auto", tmp_path, None)
    with pytest.raises(ValueError, match=words):
        read_defaults("none", tmp_path, text)
    good = read_defaults("auto", tmp_path, '{"max_new_tokens": 7, "top_p": 0.5}')
    assert (good["max_new_tokens"], good["top_p"]) in ((7, 0.5),)


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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/audio/speech", "/v1/images/generations"])
def test_what_this_server_does_not_make_is_said(server: Server, path: str) -> None:
    response = server.post(path, {"input": "a"})
    made = path.removeprefix("/v1").split("/")[1]
    assert response.status_code == 404 and f"this server makes no {made}" in response.json()["error"]["message"]
