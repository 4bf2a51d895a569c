"""Structured outputs over HTTP: every field that asks for one, with answers that match, and errors that say why."""

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serving import NAME, Server

SCHEMA: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "yes": {"type": "boolean"}},
    "required": ["kind", "yes"],
    "additionalProperties": False,
}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
GBNF = 'root ::= "x" [0-9] "y"'


class Answer(BaseModel):
    kind: Literal["a", "b"]
    yes: bool


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": JSON_SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}, "temperature": 1, "seed": 3},
    ],
)
def test_json_by_a_schema(server: Server, fields: dict[str, Any]) -> None:
    found = server.chat(max_tokens=80, **fields).json()["choices"][0]
    Answer.model_validate_json(found["message"]["content"], strict=True)
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-4]{3}"}}, "[0-4]{3}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": GBNF}}, "x[0-9]y"),
        ({"grammar": GBNF}, "x[0-9]y"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_expressions_choices_and_grammars(server: Server, path: str, fields: dict[str, Any], pattern: str) -> None:
    given = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    choice = server.post(path, given | fields | {"max_tokens": 20}).json()["choices"][0]
    assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])


NUMBERS = {"type": "json_schema", "json_schema": {"enum": [1, 22]}}
TAG: dict[str, Any] = {"type": "tag", "begin": "<f=a>", "content": NUMBERS, "end": "</f>"}
OTHER: dict[str, Any] = {"begin": "<f=b>", "content": {"type": "regex", "pattern": "x/[yz]"}, "end": "</f>"}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", ", "at_least_one": True}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, OTHER], "at_least_one": True}
CALL = r"<f=(a>(1|22)|b>x/[yz])</f>"


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        (TAG, r"<f=a>(1|22)</f>"),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "hey "}, TAG]}, r"hey <f=a>(1|22)</f>"),
        ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, r"<f=a>(1|22)</f>|no"),
        (SEPARATED, rf"{CALL}(, {CALL})*"),
        (SEPARATED | {"stop_after_first": True}, CALL),
        (TRIGGERED | {"stop_after_first": True}, rf"(?s).*?{CALL}"),
        (TRIGGERED, rf"(?s)((?!<f=).)*({CALL}((?!<f=).)*)+"),
    ],
)
def test_structural_tags(server: Server, tag: dict[str, Any], pattern: str) -> None:
    """The bias makes the model write letters of the trigger at random; the grammar decides what may follow."""
    model = server.service.loaded.model
    bias = dict.fromkeys([*map(str, model.codec.encode("<f=")), *map(str, model.eos)], 30)
    given = {"type": "structural_tag", "format": tag}
    for fields in ({"structured_outputs": {"structural_tag": json.dumps(given)}}, {"response_format": given}):
        answer = server.chat(max_tokens=400, logit_bias=bias, temperature=2, seed=1, **fields).json()
        text = answer["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, text), text


def test_openai_s_parse_and_stream(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        parsed = chat.parse(model=NAME, messages=messages, response_format=Answer, temperature=0, max_tokens=80)
        assert isinstance(parsed.choices[0].message.parsed, Answer)
        with chat.stream(model=NAME, messages=messages, response_format=Answer, temperature=0) as stream:
            final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "schema"),
        ({"json_schema": {"type": "object", "unevaluatedProperties": False}}, "json_schema", "unevaluatedProperties"),
        ({"json_schema": {"properties": {"a": {"$ref": "#/missing"}}}}, "json_schema", "missing"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"structural_tag": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "format"),
        ({"response_format": {"type": "structural_tag", "format": TRIGGERED | {"triggers": ["<g"]}}},
         "response_format", "triggers"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "sequence", "elements": [TRIGGERED, TAG]}}},
         "response_format", "at the end"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "grammar", "grammar": "x"}}},
         "response_format", "grammar"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": [
          {"begin": "<f>", "schema": {"type": "object", "unevaluatedProperties": False}, "end": "</f>"}]}},
         "response_format", "unevaluatedProperties"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs"),
        ({"structured_outputs": {"json_object": 3}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "choice"),
        ({"grammar": "root ::= missing", "max_tokens": 3}, "grammar", "missing"),
        ({"grammar": GBNF, "json_schema": {}}, "json_schema", "exclude"),
        ({"structured_outputs": {"json": '{"a":' * 2000 + "1" + "}" * 2000}}, "structured_outputs", "nested"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(server: Server, fields: dict[str, Any], param: str, word: str) -> None:
    response = server.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and word in error["message"]
