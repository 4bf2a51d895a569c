"""`/v1/responses`: answers, calls, streams and errors, with OpenAI's client."""

from collections.abc import Iterator
from typing import Any

import openai
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


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
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
        ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens"),
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


def test_a_failed_response(server: Server, client: Any) -> None:
    server.engine.broken = True
    events = list(client.responses.create(model=NAME, input="hi", stream=True))
    assert events[-1].type == "response.failed" and "engine" in events[-1].response.error.message
