"""`/v1/responses`: answers, calls, streams and errors, with OpenAI's client."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import NAME, Server, running_server
from test_structured import Answer

from command import save_tiny_model
from foretell.serve.protocol.responses import ResponseAnswer

TOOL: Any = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                   "additionalProperties": False},
}  # fmt: skip
ITEMS: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "r", "summary": []},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "done"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    with running_server(path=model) as found:
        yield found


def test_a_response_is_the_chat_s_answer(server: Server, client: Any) -> None:
    found = client.responses.create(model=NAME, input="hello", temperature=0, max_output_tokens=8)
    chat = server.chat("hello").json()
    ResponseAnswer.model_validate(found.to_dict() | {"created_at": int(found.created_at)}, strict=True)
    assert found.output_text == chat["choices"][0]["message"]["content"] and not found.store
    assert found.usage.output_tokens == 8 and found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    counted = client.responses.input_tokens.count(model=NAME, input="hello")
    assert counted.input_tokens == found.usage.input_tokens


def test_the_events_of_a_response(client: Any) -> None:
    options: Any = {"model": NAME, "instructions": "be kind", "input": ITEMS, "temperature": 0, "max_output_tokens": 6}
    options["extra_body"] = {"ignore_eos": True}
    events = list(client.responses.create(stream=True, **options))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(e.delta for e in events[4:-4])
    assert text == events[-1].response.output_text == client.responses.create(**options).output_text


def test_calls_of_a_response(client: Any) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}, "temperature": 0}
    found = client.responses.create(model=NAME, input="hi", **options)
    (call,) = found.output
    assert found.status == "completed" and call.type == "function_call" and call.name == "look" and call.call_id
    assert call.arguments in ('{"x": 1}', '{"x": 2}')
    with client.responses.stream(model=NAME, input="hi", **options) as stream:
        kinds = [e.type for e in stream]
        (again,) = stream.get_final_response().output
    assert again.arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds


def test_the_form_of_a_response(client: Any) -> None:
    found = client.responses.parse(model=NAME, input="hi", text_format=Answer, temperature=0)
    assert isinstance(found.output_parsed, Answer)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a" * 3000}, "input"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        (
            {
                "input": "a",
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "other"}],
                },
            },
            "tool_choice",
        ),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "all"}}, "tool_choice"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "king", "content": "x"}]}, "input"),
        ({"input": "a", "n": 2}, "n"),
    ],
)
def test_bad_responses_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_the_log_probabilities_of_a_response_are_the_chat_s(server: Server, client: Any) -> None:
    options: Any = {"model": NAME, "input": "hello", "temperature": 0, "max_output_tokens": 8, "top_logprobs": 2}
    options |= {"include": ["message.output_text.logprobs"], "extra_body": {"ignore_eos": True}}
    found = client.responses.create(**options)
    wanted = server.chat("hello", logprobs=True, top_logprobs=2, ignore_eos=True).json()["choices"][0]["logprobs"]
    (part,) = found.output[0].content
    assert [entry.to_dict() for entry in part.logprobs] == wanted["content"] and len(wanted["content"]) == 8
    events = list(client.responses.create(stream=True, **options))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    streamed = [entry.to_dict() for e in deltas for entry in e.logprobs]
    (done,) = (e for e in events if e.type == "response.output_text.done")
    assert streamed == wanted["content"] == [entry.to_dict() for entry in done.logprobs]
    assert [e.to_dict() for e in events[-1].response.output[0].content[0].logprobs] == wanted["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in streamed).decode(errors="replace") == done.text
    assert all(delta.logprobs for delta in deltas)


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3, "reasoning": {"effort": "high"}}, "max_tool_calls, reasoning"),
        ({"include": ["reasoning.encrypted_content"]}, "include has no effect for reasoning.encrypted_content"),
        ({"top_logprobs": 2}, "top_logprobs has no effect"),
        ({"max_output_tokens": 5000}, "5000 new tokens were asked for"),
        ({"truncation": "disabled", "reasoning": {"effort": None}, "store": False}, ""),
    ],
)
def test_what_a_response_ignores_is_said(server: Server, fields: dict[str, Any], warning: str) -> None:
    response = server.post("/v1/responses", {"input": "a", "max_output_tokens": 4} | fields)
    assert response.status_code == 200
    shown = response.headers.get("x-foretell-warning", "")
    assert warning in shown and bool(warning) == bool(shown)


def test_only_allowed_tools_are_called(client: Any) -> None:
    tools = [TOOL, TOOL | {"name": "other"}]
    functions = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
    for name in ("look", "other"):
        options: Any = {"model": NAME, "temperature": 0}
        allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]}
        found = client.responses.create(input="hi", tools=tools, tool_choice=allowed, **options)
        assert {call.name for call in found.output} == {name} and found.tool_choice.to_dict() == allowed
        chosen = [{"type": "function", "function": {"name": name}}]
        chat = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": chosen}}
        question = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(messages=question, tools=functions, tool_choice=chat, **options)
        assert {call.function.name for call in answer.choices[0].message.tool_calls} == {name}


def test_a_failed_response(server: Server, client: Any) -> None:
    server.engine.broken = True
    events = list(client.responses.create(model=NAME, input="hi", stream=True))
    assert events[-1].type == "response.failed" and "engine" in events[-1].response.error.message
