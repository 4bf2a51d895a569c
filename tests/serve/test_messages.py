"""Anthropic's `/v1/messages`, with its own client."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from serving import NAME, SETTINGS, Server, running_server

from command import save_tiny_model
from foretell.serve.protocol.messages import MessageAnswer

KEY = "secret"
GREEDY: Any = {"extra_body": {"temperature": 0}}
QUESTION: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "name": "look",
    "description": "now",
    "input_schema": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                     "additionalProperties": False},
}  # fmt: skip
HISTORY: Any = [
    *QUESTION,
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "done"}]},
        {"type": "text", "text": "and?"},
    ]},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    with running_server(replace(SETTINGS, api_keys=(KEY,)), path=model) as found:
        found.http.headers["x-api-key"] = KEY
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as found:
        yield found


def test_a_message_is_the_chat_s_answer(server: Server, client: Any) -> None:
    found = client.messages.create(model=NAME, max_tokens=8, messages=QUESTION, system="be kind", **GREEDY)
    MessageAnswer.model_validate(found.to_dict(), strict=True)
    messages = [{"role": "system", "content": "be kind"}, *QUESTION]
    chat = server.chat(messages=messages).json()
    assert found.content[0].text == chat["choices"][0]["message"]["content"]
    assert found.stop_reason == "max_tokens" and found.stop_sequence is None and found.usage.output_tokens == 8
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model=NAME, messages=QUESTION, system=[{"type": "text", "text": "be kind"}])
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_has_anthropic_s_events(server: Server, client: Any) -> None:
    options: Any = {"model": NAME, "max_tokens": 6, "messages": HISTORY, "tools": [TOOL], **GREEDY}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        kinds = [e.type for e in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    raw = server.post("/v1/messages", options | {"stream": True, "temperature": 0}).text
    assert [x.split("\n")[0] for x in raw.split("\n\n")][:3] == [
        "event: message_start", "event: ping", "event: content_block_start",
    ]  # fmt: skip


def test_a_call(client: Any) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}, **GREEDY}
    options |= {"model": NAME, "max_tokens": 100, "messages": QUESTION}
    found = client.messages.create(**options)
    (block,) = found.content
    assert found.stop_reason == "tool_use" and block.name == "look" and block.input in ({"x": 1}, {"x": 2})
    with client.messages.stream(**options) as stream:
        (again,) = stream.get_final_message().content
    assert again.input == block.input


def test_stop_sequences_and_prefilled_answers(server: Server, client: Any) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "well"}]
    text = server.post("/v1/completions", {"prompt": "u:hello\na:well", "max_tokens": 20, "temperature": 0}).json()
    stop = text["choices"][0]["text"][4:6]
    options: Any = {"model": NAME, "max_tokens": 20, "messages": messages, **GREEDY}
    found = client.messages.create(stop_sequences=[stop], **options)
    assert found.stop_reason == "stop_sequence" and found.stop_sequence == stop
    assert text["choices"][0]["text"].startswith(found.content[0].text)


def test_an_answer_by_a_schema(client: Any) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
    found = client.messages.create(model=NAME, max_tokens=50, messages=QUESTION, output_config=form)
    assert json.loads(found.content[0].text)["x"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "source"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "input"),
    ],
)
def test_bad_messages_are_named(server: Server, fields: dict[str, Any], words: str) -> None:
    response = server.post("/v1/messages", {"max_tokens": 5, "messages": QUESTION} | fields)
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error", body
    assert body["error"]["type"] == "invalid_request_error" and words in body["error"]["message"]


DOCUMENT: Any = {"type": "document", "title": "Notes", "context": "of May"}
PLAIN: Any = DOCUMENT | {"source": {"type": "text", "media_type": "text/plain", "data": "It rained."}}
PARTS: Any = DOCUMENT | {"source": {"type": "content", "content": [{"type": "text", "text": "It rained."}]}}


@pytest.mark.parametrize("document", [PLAIN, PARTS])
def test_documents_of_plain_text_are_text(client: Any, document: Any) -> None:
    """Also in the result of a tool."""
    text = {"type": "text", "text": "Notes\nof May\nIt rained."}
    for given in (
        lambda block: [{"role": "user", "content": [block, {"type": "text", "text": "and?"}]}],
        lambda block: [*HISTORY[:2], {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
        ]}],
    ):  # fmt: skip
        options = {"model": NAME, "max_tokens": 8, **GREEDY}
        found, expected = (client.messages.create(messages=given(b), **options) for b in (document, text))
        assert found.content[0].text == expected.content[0].text
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == (
            expected.usage.input_tokens + expected.usage.cache_read_input_tokens
        )


def test_max_tokens_beyond_the_context_are_cut(server: Server) -> None:
    long = [{"role": "user", "content": "hello " * 70}]
    response = server.post("/v1/messages", {"max_tokens": 32000, "messages": long})
    assert response.status_code == 200 and "32000 new tokens were asked for" in response.headers["x-foretell-warning"]


def test_unknown_paths_have_anthropic_s_shape_and_places_are_named_once(server: Server) -> None:
    for response in (server.http.get("/v1/messages/batches"), server.http.get("/v1/messages")):
        body = response.json()
        assert body["type"] == "error" and response.status_code in (404, 405)
        assert body["error"]["type"] == {404: "not_found_error", 405: "invalid_request_error"}[response.status_code]
    for fields, name in (({}, "max_tokens"), ({"max_tokens": 5, "stop_sequences": 3}, "stop_sequences")):
        message = server.post("/v1/messages", {"messages": QUESTION} | fields).json()["error"]["message"]
        assert message.startswith(name) and message.count(name) == 1
    body = {"messages": QUESTION, "max_tokens": 5, "stop_sequences": ["x"] * 99}
    message = server.post("/v1/messages", body).json()["error"]["message"]
    assert message.startswith("stop_sequences takes at most")


def test_errors_have_anthropic_s_shape(server: Server, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=QUESTION)
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError) as error,
    ):
        other.messages.create(model=NAME, max_tokens=5, messages=QUESTION)
    body: Any = error.value.body
    assert body["error"]["type"] == "authentication_error"
    server.engine.broken = True
    with (
        pytest.raises(anthropic.APIStatusError, match="engine"),
        client.messages.stream(model=NAME, max_tokens=5, messages=QUESTION) as stream,
    ):
        stream.until_done()
