"""Attacks by the content of a request: the table of docs/serving.md. Every one gets a bounded answer, and the server
goes on.
"""

import hmac
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving import SETTINGS, Server, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SMALL = 2000
"""Bytes of the largest error."""


@pytest.fixture(autouse=True)
def goes_on(server: Server) -> Iterator[None]:
    """The server answers as before after every attack."""
    yield
    server.wait_until_idle()
    assert server.health() == 200 and server.chat().status_code == 200


def refused(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a body, which is JSON or raw bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.http.post(path, content=data)
    assert response.status_code == status, response.text[:300]
    assert len(response.content) < SMALL
    error: dict[str, Any] = response.json()["error"]
    return error


BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "an array": b"[]",
    "not UTF-8": b'{"prompt": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "nesting": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a large number": b'{"prompt": "x", "max_tokens": 1' + b"0" * 100_000 + b"}",
    "infinity": b'{"prompt": "x", "temperature": 1e999}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "half a character": b'{"prompt": "\\ud800"}',
    "a list of megabytes": b'{"prompt": [' + b'"x", ' * 500_000 + b'"x"]}',
    "wrong elements": b'{"prompt": [' + b"1.5, " * 500_000 + b"1]}",
    "a long field name": b'{"' + b"x" * 1_000_000 + b'": 1}',
    "tokens beyond the vocabulary": b'{"prompt": [99999999999]}',
    "negative tokens": b'{"prompt": [-1]}',
}


@pytest.mark.parametrize("name", BODIES)
def test_malformed_bodies_get_400_without_an_echo(server: Server, name: str) -> None:
    refused(server, COMPLETIONS, BODIES[name])


def test_compressed_bodies_are_not_read(server: Server) -> None:
    found = server.http.post(COMPLETIONS, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert found.status_code == 415 and found.json()["error"]["type"] == "invalid_request_error"


def test_long_prompts_are_refused_before_they_are_encoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [{"role": "user", "content": "x" * 4000}]
    error = refused(server, CHAT, {"messages": [*texts, *texts]})
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    error = refused(server, COMPLETIONS, {"prompt": [7] * 512})
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    encoder = server.service.encoder
    monkeypatch.setattr(encoder, "_codec", None)  # Encoding would fail.
    assert refused(server, COMPLETIONS, {"prompt": "x" * 5000})["code"] == "context_length_exceeded"
    assert refused(server, COMPLETIONS, {"prompt": ["x"] * 257})["param"] == "prompt"
    assert refused(server, CHAT, {"messages": [{"role": "user", "content": "x"}] * 2049})["param"] == "messages"
    monkeypatch.undo()


def ref_chain(length: int) -> dict[str, Any]:
    """A schema of so many definitions with 8 references each: 8 to the power of `length` paths."""
    chain: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "abcdefgh"}}
        for i in range(length)
    }
    return {"$defs": chain | {f"d{length}": {"const": 1}}, "$ref": "#/$defs/d0"}


def nested_schema(levels: int, one: dict[str, Any]) -> dict[str, Any]:
    for _ in range(levels):
        more = {"type": "object", "properties": {f"p{_}": {"type": "integer"}}}
        one = {"allOf": [{"anyOf": [one, more]}, {"anyOf": [one, {"type": "object"}]}]}
    return one


FIELDS: dict[str, Any] = {
    "stop": ["ab" * 1000],
    "bad_words": ["x"] * 2000,
    "prompt_logprobs": 200,
    "allowed_token_ids": [1] * 1_000_000 + [99_999],
    "stop_token_ids": [1] * 1_000_000 + [99_999],
    "logit_bias": {str(i): 1 for i in range(200_000)},
}


@pytest.mark.parametrize("name", FIELDS)
def test_large_fields_are_refused_by_name(server: Server, name: str) -> None:
    """Every step of the engine would look at them, for the requests of all tenants."""
    assert refused(server, COMPLETIONS, {"prompt": "x", "max_tokens": 2, name: FIELDS[name]})["param"] == name


def test_long_predictions_and_lists_of_tokens_are_refused(server: Server) -> None:
    message = {"messages": [{"role": "user", "content": "x"}]}
    error = refused(server, CHAT, message | {"prediction": {"type": "content", "content": "x" * 5000}})
    assert error["param"] == "prediction"
    assert refused(server, "/detokenize", {"tokens": [1] * 5000})["param"] == "tokens"


def test_repeated_tokens_are_counted_once(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    once = server.post(COMPLETIONS, body | {"allowed_token_ids": [5, 6], "stop_token_ids": [7]}).json()
    many = server.post(COMPLETIONS, body | {"allowed_token_ids": [5, 6] * 9999, "stop_token_ids": [7] * 9999}).json()
    assert once["choices"] == many["choices"]


BOMBS: dict[str, tuple[dict[str, Any], bool | None]] = {
    "a schema that refers to itself": ({"json": {"$ref": "#"}}, False),
    "schemas in a circle": ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, False),
    "exponential references": ({"json": ref_chain(20)}, True),
    "exponential alternatives": ({"json": nested_schema(6, {"type": "object"})}, False),
    "a deep schema": ({"json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}, False),
    "a large schema": ({"json": {"enum": ["x" * 10] * 20_000}}, False),
    "a remote schema": ({"json": {"$ref": "http://127.0.0.1:1/schema"}}, False),
    "a local file": ({"json": {"$ref": "file:///etc/passwd"}}, False),
    "long arrays": ({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}}, True),
    "a repeated repetition": ({"regex": "((a{0,100}){0,100}){0,100}"}, None),
    "a long repetition": ({"regex": "a{1000000}"}, False),
    "catastrophic backtracking": ({"regex": "(a|aa|a+)+b"}, True),
    "look-around": ({"regex": "(?=a)b"}, False),
    "an ambiguous grammar": ({"grammar": 'start: e\ne: e e | e e e | "a"'}, True),
    "a deep grammar": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, False),
    "many rules": (
        {
            "grammar": "start: " + " | ".join(f"r{i}" for i in range(5000))
            + "\n" + "\n".join(f'r{i}: "{i}"' for i in range(5000))
        },
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_schema_and_regex_bombs_are_bounded(server: Server, name: str) -> None:
    """Those that compile to something small are answered, all others refused (None: it depends on the text); none takes
    long (`_SECONDS` and `_MASK_SECONDS` of the compiler).
    """
    outputs, answered = BOMBS[name]
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": outputs, "temperature": 0}
    response = server.post(COMPLETIONS, body)
    assert answered is None or response.status_code == (200 if answered else 400), response.text[:300]
    if response.status_code != 200:
        assert len(response.content) < SMALL and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"type": "array", "items": {"$ref": "file:///etc/passwd"}}, {"type": "none"}]
)
def test_bombs_in_tools_are_bounded(server: Server, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    assert refused(server, CHAT, asked)["param"] in ("tools.0.function.parameters", None)


INJECTIONS = (
    "{{ 7 * 7 }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages }}",
)


@pytest.mark.parametrize("text", INJECTIONS)
def test_templates_in_messages_are_text(server: Server, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"x": text}}
    found = server.post("/tokenize", asked).json()["tokens"]
    assert text in server.post("/detokenize", {"tokens": found}).json()["prompt"]


def test_a_request_cannot_bring_a_template_unless_allowed(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}
    assert refused(server, CHAT, body)["param"] == "chat_template"
    taken = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}
    assert refused(server, CHAT, taken)["param"] == "messages"


TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'x'.center(10 ** 10) }}",
    "{{ '%0999999999d' % 1 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% if %}",
)


def test_templates_of_requests_are_sandboxed_and_bounded() -> None:
    with running_server(replace(SETTINGS, trust_request_chat_template=True)) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for template in TEMPLATES:
            refused(server, CHAT, body | {"chat_template": template})
        assert server.post(CHAT, body | {"chat_template": "{{ messages[0].content }}"}).status_code == 200


@pytest.mark.parametrize(
    "place",
    [
        {"messages": [{"role": "user", "content": "a<end>b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a<end>b"}]}]},
        {"messages": [{"role": "system", "content": "a<end>b"}, {"role": "user", "content": "x"}]},
    ],
)
def test_control_tokens_in_messages_are_text(server: Server, place: Any) -> None:
    end = server.service.loaded.model.eos[0]
    tokens = server.post("/tokenize", place).json()["tokens"]
    assert end not in tokens and "a<end>b" in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = ("first-key", "second-key", "third-key"), list[tuple[bytes, bytes]]()

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    with running_server(replace(SETTINGS, api_keys=keys)) as server:
        monkeypatch.setattr(hmac, "compare_digest", compare)
        for given in (*keys, "", "f", "first-kez", "x" * 10_000):
            compared.clear()
            found = server.http.get("/v1/models", headers={"x-api-key": given}).status_code
            assert found == (200 if given in keys else 401)
            # Digests of one length, and all of them whichever fits.
            assert len(compared) == len(keys) and {len(x) for pair in compared for x in pair} == {32}
        monkeypatch.undo()
