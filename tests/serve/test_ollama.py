"""Ollama's API, with its own client; what the server writes is what chat completions and completions give."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ollama
import pytest
from serving import NAME, SETTINGS, SLOW, Server, running_server

from command import TEMPLATE, save_tiny_model
from foretell.serve.prompts import PromptEncoder
from foretell.serve.settings import Timeouts

KEY = "secret"
QUESTION: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"temperature": 0, "num_predict": 12}
SCHEMA: Any = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
               "additionalProperties": False}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "now", "parameters": SCHEMA}}]
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    with running_server(replace(SETTINGS, api_keys=(KEY,)), path=model) as found:
        found.http.headers["authorization"] = f"Bearer {KEY}"
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with client_of(server) as found:
        yield found


def client_of(server: Server, key: str = KEY) -> ollama.Client:
    return ollama.Client(server.url, headers={"Authorization": f"Bearer {key}"}, trust_env=False)


def text_of(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> str:
    """What OpenAI's API answers."""
    (choice,) = server.post(path, {"max_tokens": 12, "temperature": 0} | fields).json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


SETTINGS_OF_BOTH: Any = [
    ({"temperature": 0, "num_predict": 30}, {"temperature": 0, "max_tokens": 30}),
    ({"seed": 3, "num_predict": 20}, {"temperature": 1, "seed": 3, "max_tokens": 20}),
    ({"seed": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.001, "num_predict": 20},
     {"seed": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.001, "max_tokens": 20}),
    ({"temperature": 0, "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 20},
     {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
      "max_tokens": 20}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "fields"), SETTINGS_OF_BOTH)
def test_a_chat_is_the_chat_completion_s_answer(server: Server, client: Any, options: Any, fields: Any) -> None:
    messages = [{"role": "system", "content": "be kind"}, *QUESTION]
    chat = server.post("/v1/chat/completions", {"messages": messages} | fields).json()
    text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    whole = client.chat(NAME, messages, options=options)
    *pieces, last = client.chat(NAME, messages, options=options, stream=True)
    assert whole.message.content == text == "".join(piece.message.content for piece in [*pieces, last])
    assert whole.message.role == "assistant" and not any(piece.done for piece in pieces) and len(pieces) > 1
    for found in (whole, last):
        assert found.done and found.done_reason == "length" and found.model == NAME
        assert (found.prompt_eval_count, found.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert found.total_duration >= found.eval_duration > 0 and found.prompt_eval_duration > 0
        assert found.load_duration == 0 and found.model_dump(exclude_none=True).keys() >= COUNTS
    prompted = client.generate(NAME, "hello", system="be kind", options=options)
    streamed = client.generate(NAME, "hello", system="be kind", options=options, stream=True)
    assert prompted.response == text == "".join(piece.response for piece in streamed)


def test_durations_are_nanoseconds(server: Server, client: Any) -> None:
    server.engine.delay = 0.02
    try:
        found = client.generate(
            NAME,
            "what",
            options={"temperature": 0, "num_predict": 6, "max_drafts": 0},
        )
    finally:
        server.engine.delay = 0.0
    assert 0.02e9 < found.total_duration < 10e9 and found.eval_duration <= found.total_duration


def test_a_raw_prompt_is_the_completion_s_text(server: Server, client: Any) -> None:
    text = text_of(server, "/v1/completions", prompt="once upon")
    whole = client.generate(NAME, "once upon", raw=True, options=GREEDY)
    streamed = client.generate(NAME, "once upon", raw=True, options=GREEDY, stream=True)
    assert whole.response == text == "".join(piece.response for piece in streamed)
    unlimited = client.generate(NAME, "once upon", raw=True, options={"temperature": 0, "num_predict": -1})
    assert unlimited.eval_count > 16 and unlimited.response.startswith(text)


def test_stop_and_lengths(server: Server, client: Any) -> None:
    text = text_of(server, messages=QUESTION, max_tokens=30)
    stop = text[10:12]
    found = client.chat(NAME, QUESTION, options={"temperature": 0, "num_predict": 30, "stop": [stop]})
    assert found.message.content == text.partition(stop)[0] and found.done_reason == "stop"
    long: Any = [{"role": "user", "content": "hello " * 70}]  # leaves room for few tokens
    longest = text_of(server, messages=long, max_tokens=None)
    assert len(longest) > 20
    for none in (0, -2):
        assert client.chat(NAME, long, options={"temperature": 0, "num_predict": none}).message.content == longest


def test_seed_minus_one_is_a_new_one(client: Any) -> None:
    texts = {client.generate(NAME, "x", options={"seed": -1, "num_predict": 20}).response for _ in range(3)}
    assert len(texts) == 3


def test_lines_of_json_by_default(server: Server) -> None:
    answer = server.post("/api/chat", {"model": NAME, "messages": QUESTION, "options": GREEDY})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    *lines, last = [json.loads(line) for line in answer.text.splitlines()]
    assert all(set(line) == {"model", "created_at", "message", "done"} for line in lines)
    assert last["done"] and last["message"] == {"role": "assistant", "content": ""} and last.keys() >= COUNTS
    whole = server.post("/api/generate", {"prompt": "hello", "options": GREEDY, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert set(whole.json()) == {"model", "created_at", "response", "done", "done_reason", "foretell", *COUNTS}


def test_formats(server: Server, client: Any) -> None:
    found = client.chat(NAME, QUESTION, format=SCHEMA, options={"temperature": 0, "num_predict": 50})
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert found.message.content == text_of(server, messages=QUESTION, response_format=form, max_tokens=50)
    assert json.loads(found.message.content)["x"] in (1, 2)
    for raw in (False, True):
        text = client.generate(NAME, "hello", raw=raw, format=SCHEMA, options=GREEDY).response
        assert json.loads(text)["x"] in (1, 2)
    object = client.chat(NAME, QUESTION, format="json", options=GREEDY).message.content
    assert object == text_of(server, messages=QUESTION, response_format={"type": "json_object"})
    assert client.chat(NAME, QUESTION, format="", options=GREEDY).message.content == text_of(server, messages=QUESTION)


def test_tools(server: Server) -> None:
    form, answer = {"const": 7}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    kinds = set()
    for seed in range(30):
        asked: Any = {"messages": QUESTION, "tools": TOOLS}
        chat = {"response_format": answer, "seed": seed, "max_tokens": 200}
        message = server.post("/v1/chat/completions", asked | chat).json()["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        asked |= {"format": form, "options": {"seed": seed, "num_predict": 200}}
        whole = ollama.ChatResponse(**server.post("/api/chat", asked | {"stream": False}).json())
        streamed = [ollama.ChatResponse(**json.loads(x)) for x in server.post("/api/chat", asked).text.splitlines()]
        made = [call.function for piece in streamed for call in piece.message.tool_calls or ()]
        assert made == [call.function for call in whole.message.tool_calls or ()]
        assert [call.name for call in made] == [call["name"] for call in calls]
        # The last call may be cut: its text stands for its arguments then.
        assert [call.arguments for call in made[:-1]] == [json.loads(call["arguments"]) for call in calls[:-1]]
        assert whole.message.content == (message["content"] or "")
        kinds.add(len(calls) > 1)
        if seed >= 7 and len(kinds) == 2:
            break
    assert kinds == {True, False}


def test_the_client_gets_calls(server: Server, client: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "stop"}}]
    for seed in range(30):
        options: Any = {"seed": seed, "num_predict": 100}
        found = client.chat(NAME, QUESTION, tools=tools, format={"const": 7}, options=options)
        if found.message.tool_calls:
            call = found.message.tool_calls[0].function
            assert call.name == "stop" and call.arguments in ({}, {"text": ""}) and found.done_reason
            return
        assert found.message.content == "7" and found.done_reason == "stop"
    raise AssertionError("no seed made a call")


def test_a_conversation_with_calls_is_the_chat_completion_s_prompt(
    server: Server, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = list[Any]()
    encode = PromptEncoder.messages

    def keep(self: Any, messages: Any, *rest: Any, **options: Any) -> Any:
        prompts.append([message.model_dump(include=kept) for message in messages])
        return encode(self, messages, *rest, **options)

    kept = {"role", "content", "name", "tool_calls", "tool_call_id"}
    monkeypatch.setattr(PromptEncoder, "messages", keep)
    function = {"name": "look", "arguments": {"x": 1}}
    history: Any = [*QUESTION, {"role": "assistant", "thinking": "hm", "content": "I look.", "tool_calls": [
        {"function": function}]}, {"role": "tool", "tool_name": "look", "content": "done"}]  # fmt: skip
    client.chat(NAME, history, options=GREEDY)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"x":1}'}}
    history[1] = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    history[2] = {"role": "tool", "name": "look", "content": "done"}
    server.post("/v1/chat/completions", {"messages": history, "max_tokens": 1})
    ours, theirs = prompts
    assert ours == theirs


def test_log_probabilities(server: Server, client: Any) -> None:
    chat = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    options: Any = {"temperature": 0, "num_predict": 8}
    whole = server.post("/api/chat", {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, "options": options,
                                      "stream": False}).json()  # fmt: skip
    assert whole["logprobs"] == chat
    pieces = client.chat(NAME, QUESTION, logprobs=True, top_logprobs=2, options=options, stream=True)
    streamed = [entry for piece in pieces for entry in piece.logprobs or ()]
    assert [(e.token, e.logprob) for e in streamed] == [(e["token"], e["logprob"]) for e in chat]
    raw = client.generate(NAME, "u:hello\na:", raw=True, logprobs=True, options=options)
    assert [e.token for e in raw.logprobs] == [e["token"] for e in chat]


def test_thinking_is_the_template_s_switch(client: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(NAME, QUESTION, think=True)
    plain = client.chat(NAME, QUESTION, think=False, options=GREEDY)
    assert plain.message.content == text_of(server, messages=QUESTION)
    assert client.show(NAME).capabilities == ["completion", "tools"]
    switch = "{% if enable_thinking %}think{% endif %}{{ reasoning_effort or '' }}" + TEMPLATE
    codec = replace(server.service.encoder._codec, chat_template=switch)
    monkeypatch.setattr(server.service.loaded.model, "codec", codec)
    monkeypatch.setattr(server.service.encoder, "_codec", codec)
    assert client.show(NAME).capabilities[-1] == "thinking" and client.show(NAME).template == switch
    for think, kwargs in (
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ):
        found = client.chat(NAME, QUESTION, think=think, options=GREEDY)
        chat = server.chat(chat_template_kwargs=kwargs, max_tokens=12).json()
        assert found.message.content == chat["choices"][0]["message"]["content"]
        assert found.prompt_eval_count == chat["usage"]["prompt_tokens"]


def test_models(server: Server, client: Any) -> None:
    assert [model.model for model in client.list().models] == [NAME, "alias"]
    (model, _), shown = client.ps().models, client.show("alias")
    assert model.context_length == 2048 == shown.modelinfo["llama.context_length"] and len(model.digest) == 64
    assert model.expires_at.year > 2100 and client.list().models[0].modified_at.year >= 2024
    assert shown.template == TEMPLATE and shown.details.family == "llama" and "temperature 1.0" in shown.parameters
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.block_count"] == 2
    assert server.post("/api/show", {"name": NAME}).status_code == 200
    assert server.http.get("/api/version").json()["version"].count(".") == 2
    for name in ("alias", f"{NAME}:latest"):
        assert client.generate(name, "x", options=GREEDY).model == name.removesuffix(":latest")
    with pytest.raises(ollama.ResponseError, match="this server has tiny, alias") as error:
        client.chat("other", QUESTION)
    assert error.value.status_code == 404


def test_a_request_without_a_prompt_loads_the_model(client: Any) -> None:
    for found in (client.generate(NAME), client.generate(NAME, keep_alive=0), client.chat(NAME, [])):
        assert found.done and found.done_reason == "load"
    assert client.generate(NAME, "x", keep_alive="5m", options=GREEDY).response


REFUSED: Any = [
    ("/api/chat", {"options": {"temperature": -1}}, "options.temperature must be at least 0"),
    ("/api/chat", {"options": {"top_k": 1.5}}, "options.top_k must be a whole number"),
    ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty must be above 0"),
    ("/api/chat", {"options": {"num_predict": "x"}}, "options.num_predict"),
    ("/api/chat", {"options": {"stop": ["a"] * 20}}, "options.stop takes at most 16 strings"),
    ("/api/chat", {"options": {"n": 2}}, "options.n"),
    ("/api/chat", {"format": "xml"}, "format: "),
    ("/api/chat", {"format": {"not": {}}}, "format: "),
    ("/api/chat", {"think": "much"}, "think: "),
    ("/api/chat", {"tools": [{"function": {}}]}, "tools.0.function.name"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages.0.images: "),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "b"}}]}]},
     "messages.0.tool_calls: the arguments of a call"),
    ("/api/generate", {"images": ["aGk="]}, "images are read in /v1/chat/completions"),
    ("/api/generate", {"suffix": "end"}, "suffix"),
    ("/api/generate", {"suffix": "end", "raw": True}, "suffix"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
    ("/api/generate", {"context": [1, 2]}, "context"),
    ("/api/generate", {"raw": True, "system": "be kind"}, "system: raw goes without system"),
    ("/api/generate", {"raw": True, "think": True}, "think: raw goes without think"),
    ("/api/generate", {"prompt": "a" * 3000}, "prompt: this model's maximum context length"),
    ("/api/generate", {"prompt": 5}, "prompt: "),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "words"), REFUSED)
def test_bad_requests_are_named(server: Server, path: str, fields: Any, words: str) -> None:
    answer = server.post(path, {"model": NAME, "messages": QUESTION, "prompt": "hello"} | fields)
    body = answer.json()
    assert answer.status_code == 400 and list(body) == ["error"] and words in body["error"], body


def test_what_is_not_offered_is_refused_in_ollama_s_form(server: Server, client: Any) -> None:
    calls: Any = (
        lambda: client.pull("x"),
        lambda: client.push("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
        lambda: client.embed(NAME, "x"),
        lambda: client.embeddings(NAME, "x"),
    )
    for call in calls:
        with pytest.raises(ollama.ResponseError, match="is not offered: this server") as error:
            call()
        assert error.value.status_code == 501
    blob = server.http.post(f"/api/blobs/sha256:{'0' * 64}")
    assert blob.status_code == 501 and list(blob.json()) == ["error"]
    for method, path, status in (("GET", "/api/chat", 405), ("GET", "/api/nothing", 404)):
        answer = server.http.request(method, path)
        assert answer.status_code == status and isinstance(answer.json()["error"], str)


def test_unknown_fields_are_named(server: Server) -> None:
    options = GREEDY | {"mirostat": 1, "num_ctx": 4096}
    answer = server.post("/api/generate", {"prompt": "x", "options": options, "odd": 1, "stream": False})
    warning = answer.headers["X-Foretell-Warning"]
    assert all(name in warning for name in ("odd", "options.mirostat", "options.num_ctx"))
    fields: Any = {"messages": [QUESTION[0] | {"mood": "good"}], "options": {"num_predict": 10**6}, "stream": False}
    warning = server.post("/api/chat", fields).headers["X-Foretell-Warning"]
    assert "messages.mood" in warning and "1000000 new tokens were asked for" in warning


def test_keys_hosts_and_origins(server: Server) -> None:
    with client_of(server, "wrong") as other, pytest.raises(ollama.ResponseError, match="valid API key") as error:
        other.list()
    assert error.value.status_code == 401
    foreign = server.post("/api/chat", {"messages": QUESTION}, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403 and isinstance(foreign.json()["error"], str)


def test_a_client_that_leaves_frees_its_row(server: Server) -> None:
    server.engine.delay = SLOW / 4
    try:
        client: Any = client_of(server)
        pieces: Any = client.chat(NAME, QUESTION, options={"temperature": 0, "num_predict": 1000}, stream=True)
        assert next(pieces).message.content
        pieces.close()
        client.close()
        server.wait_until_idle()
    finally:
        server.engine.delay = 0.0


def test_a_silent_stream_is_kept_open_by_blanks(tmp_path: Any) -> None:
    settings = replace(SETTINGS, timeouts=Timeouts(keep_alive_interval=0.05))
    with running_server(settings) as server:
        server.engine.delay = SLOW
        answer = server.post("/api/chat", {"messages": QUESTION, "options": {"temperature": 0, "num_predict": 3}})
        assert answer.text.startswith(" ") and "ping" not in answer.text
        with client_of(server) as client:
            *_, last = client.chat(NAME, QUESTION, options={"temperature": 0, "num_predict": 3}, stream=True)
        assert last.done


def test_an_engine_that_fails_ends_the_stream_with_an_error() -> None:
    with running_server() as server, client_of(server) as client:
        server.engine.broken = True
        with pytest.raises(ollama.ResponseError, match="engine"):
            list(client.chat(NAME, QUESTION, stream=True))
