"""Tools over HTTP: calls that the grammar enforces, prompts with tools, streams, and older functions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving import NAME, Server, running_server

from command import save_tiny_model, tiny_target
from foretell.load import load
from foretell.serve.constraints import make_constraint
from foretell.serve.errors import ApiError
from foretell.serve.prompts import PromptEncoder
from foretell.serve.protocol.chat import ChatBody, ChatCompletion
from foretell.serve.settings import Limits

QUESTION: Any = [{"role": "user", "content": "hi"}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
HISTORY: Any = [
    *QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    with running_server(path=model) as found:
        yield found


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert (name, value) == ("stop", {}) or (name == "weather" and value["unit"] in ("C", "F"))


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_is_enforced(server: Server, client: Any, choice: Any, temperature: float) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "seed": 1, "max_tokens": 200}
    options |= {"parallel_tool_calls": False, "model": NAME, "messages": QUESTION}
    found = client.chat.completions.create(**options)
    ChatCompletion.model_validate(found.to_dict(), strict=True)
    message = found.choices[0].message
    assert message.content is None and found.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    check_call(call.function.name, call.function.arguments)
    assert choice == "required" or call.function.name == "weather"
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


def test_several_calls(client: Any) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required", "seed": 5, "max_tokens": 150}
    found = client.chat.completions.create(model=NAME, messages=QUESTION, **options).choices[0]
    for call in found.message.tool_calls[:-1]:
        check_call(call.function.name, call.function.arguments)
    assert len({call.id for call in found.message.tool_calls}) == len(found.message.tool_calls)


def test_deltas_of_a_call(client: Any) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    chunks = list(client.chat.completions.create(model=NAME, messages=QUESTION, stream=True, **options))
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function.name == "weather" and deltas[0].type == "function"
    assert not any(d.id or d.function.name for d in deltas[1:]) and {d.index for d in deltas} == {0}
    check_call("weather", "".join(d.function.arguments for d in deltas))
    assert not any(c.choices[0].delta.content for c in chunks) and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_auto_gives_text_or_a_call(server: Server) -> None:
    plain = server.chat(tools=TOOLS, tool_choice="auto").json()
    assert plain["choices"][0]["finish_reason"] != "tool_calls" and "tool_calls" not in plain["choices"][0]["message"]
    assert (
        plain["usage"]["prompt_tokens"] > server.chat(tools=TOOLS, tool_choice="none").json()["usage"]["prompt_tokens"]
    )
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    found = server.chat(tools=TOOLS, response_format=answer, max_tokens=300).json()["choices"][0]
    assert found["message"]["content"] == "7" or found["message"]["tool_calls"]


def test_functions_of_older_clients(client: Any) -> None:
    functions: Any = [TOOLS[0]["function"]]
    options: Any = {"functions": functions, "function_call": {"name": "weather"}, "temperature": 0}
    choice = client.chat.completions.create(model=NAME, messages=QUESTION, **options).choices[0]
    check_call(choice.message.function_call.name, choice.message.function_call.arguments)
    assert choice.finish_reason == "function_call"


def prompt_of(template: str | None, **fields: Any) -> str:
    """What the model reads."""
    codec = load(str(tiny_target()), dtype="float32").codec
    encoder = PromptEncoder(codec, 4096, Limits(), trust_request_chat_template=True)
    body = ChatBody.model_validate({"messages": HISTORY, "chat_template": template, **fields})
    return codec.decode(encoder.chat(body, encoder.tools(body)).tokens, skip_special_tokens=False)


def test_a_template_with_tools_gets_them() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}|{{ m | tojson }}{% endfor %}"
    tools, _, call, result = prompt_of(template, tools=TOOLS).split("|")
    assert json.loads(tools) == TOOLS
    assert json.loads(call)["tool_calls"][0]["function"] == {"name": "stop", "arguments": {}}
    assert json.loads(result)["tool_call_id"] == "call_1"
    injected = [{"type": "function", "function": {"name": "f", "description": "<end>"}}]
    assert "<end>" in prompt_of(template, tools=injected)


LISTED = "{% for m in messages %}{% for k, v in m | dictsort %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
READS_PARTS = (
    "{% for m in messages %}{% for p in m.content if m.content is not string %}<{{ p.text }}>{% endfor %}{% endfor %}"
)


def test_fields_of_messages_reach_the_template() -> None:
    message = {"role": "user", "content": "a", "reasoning_content": "b", "no_such": {"x": [1]}, "empty": None}
    assert (
        prompt_of(LISTED, messages=[message])
        == "content=a;no_such={'x': [1]};reasoning=b;reasoning_content=b;role=user;thinking=b;"
    )


def test_parts_are_given_to_templates_that_read_them() -> None:
    messages = [{"role": "user", "content": PARTS}]
    assert prompt_of(READS_PARTS, messages=messages) == "<one><two>"
    assert prompt_of("{{ messages[0].content + '!' }}", messages=messages) == "one\ntwo!"
    with pytest.raises(ValueError, match="part 0 is an image_url without a url"):
        prompt_of(LISTED, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("arguments", '{"a":1}'),
        ("arguments | tojson", '{"a": 1}'),
        ("arguments if {0}.arguments is string else {0}.arguments | tojson", '{"a": 1}'),
    ],
)
def test_arguments_are_objects_unless_a_template_wants_text(arguments: str, written: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    name = "c.function"
    form = "{{ " + name + "." + arguments.replace("{0}", name) + " }}"
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + form + "{% endfor %}{% endfor %}{# tools #}"
    assert prompt_of(template, messages=messages) == written
    refuses = template + "{{ messages[1]['content'] + '' }}"
    assert prompt_of(refuses, messages=messages) == written


def test_a_template_is_chosen_by_name() -> None:
    codec = replace(
        load(str(tiny_target()), dtype="float32").codec,
        named_templates={"rag": "RAG", "tool_use": "TOOL {{ tools | length }}"},
    )
    encoder = PromptEncoder(codec, 4096, Limits(), trust_request_chat_template=False)

    def prompt(**fields: Any) -> str:
        body = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
        return codec.decode(encoder.chat(body, encoder.tools(body)).tokens, skip_special_tokens=False)

    assert prompt(chat_template="rag") == "RAG" and prompt(tools=TOOLS[:1]) == "TOOL 1"
    assert prompt().startswith("u:a")
    with pytest.raises(ApiError, match="uses no templates of requests"):
        prompt(chat_template="{{ messages }}")


def test_a_template_without_tools_gets_the_default_format() -> None:
    text = prompt_of(None, tools=TOOLS)
    assert text.startswith("s:You can call functions.") and '{"name": "weather", "description": "now"' in text
    assert 'a:<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\nu:<tool_response>\ndone' in text


def test_special_tokens_in_tools_are_text() -> None:
    codec = load(str(tiny_target()), dtype="float32").codec
    encoder = PromptEncoder(codec, 4096, Limits(), trust_request_chat_template=True)
    tools = [
        {"type": "function", "function": {"name": "f", "description": "<end>", "parameters": {"<end>": ["<end>"]}}}
    ]
    body = ChatBody.model_validate({"messages": QUESTION, "tools": tools, "chat_template": "{{ tools | tojson }}<end>"})
    tokens = encoder.chat(body, encoder.tools(body)).tokens
    assert tokens.count(256) == 1 and tokens[-1] == 256 and codec.decode(tokens[:-1]).count("<end>") == 3


@pytest.mark.parametrize("mark", ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]", ""])
def test_the_grammar_of_every_syntax_gives_calls_that_are_read(mark: str) -> None:
    model = load(str(tiny_target()), dtype="float32")
    encoder = PromptEncoder(model.codec, 4096, Limits(), trust_request_chat_template=True)
    fields = {"chat_template": f"{{{{ tools }}}}{mark}", "tools": TOOLS, "tool_choice": "required"}
    use = encoder.tools(ChatBody.model_validate({"messages": QUESTION, **fields}))
    assert use is not None
    constraint = make_constraint(ChatBody.model_validate({"messages": QUESTION, **fields}), model, use)
    assert constraint is not None
    key = "parameters" if mark == "<|python_tag|>" else "arguments"
    call = f'{{"name": "weather", "{key}": {{"unit": "C"}}}}'
    texts = {
        "<tool_call>": f"<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>",
        "[TOOL_CALLS]": f"[TOOL_CALLS][{call}, {call}]",
        "[TOOL_CALLS][ARGS]": '[TOOL_CALLS]weather[ARGS]{"unit": "C"}' * 2,
    }
    text = texts.get(mark, f"{call}; {call}")
    state = constraint.start()
    for token in model.codec.encode(text):
        state = constraint.advance(state, token)
        assert state is not None, text
    parser = use.parser()
    parser.feed(text, last=True)
    assert parser.calls == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools.0.function.parameters"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
         "messages.0.tool_calls"),
        ({"chat_template_kwargs": {"a": [[]] * 1}, "documents": [{"text": "x"}]}, "documents"),
        ({"chat_template_kwargs": {"a": json.loads("[" * 100 + "]" * 100)}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_bad_tools_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.chat(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_the_continued_message_is_echoed(server: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "well"}]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 4, "temperature": 0}
    plain, echoed = (
        server.post("/v1/chat/completions", fields | {"echo": echo}).json()["choices"][0]["message"]["content"]
        for echo in (False, True)
    )
    assert echoed == "well" + plain
