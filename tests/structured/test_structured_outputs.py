"""Structured outputs: what compiles, what is refused, and answers that match with every kind of method."""

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

import foretell
from command import expect_error, run_foretell, tiny_draft, tiny_target
from foretell.api import Model
from foretell.core.sampling import SamplingParams
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.structured import compiler as structured_compiler
from foretell.structured.compiler import ConstraintCompiler
from foretell.structured.outputs import StructuredOutputs
from helpers import unchecked

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "cow", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
CHOICE = ('say "yes"', "no", "not\nat all")
OUTPUTS = {
    "json": StructuredOutputs(json=SCHEMA),
    "blanks": StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?"),
    "regex": StructuredOutputs(regex="(ab|cd){2,3}[0-9]{2}xyz"),
    "choice": StructuredOutputs(choice=CHOICE),
    "grammar": StructuredOutputs(grammar='root ::= "the " item "."\nitem ::= "one" | "two" [0-9] [0-9]'),
}


@cache
def model() -> Model:
    return foretell.load(str(tiny_target()), dtype="float32")


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(model().codec, model().eos)


def methods() -> dict[str, AnyMethod]:
    draft = foretell.load(str(tiny_draft()), dtype="float32")
    with_draft = {
        name: model().method(name, drafts=[draft]) for name in ("draft_model", "dynamic_tree", "hybrid_model")
    }
    return with_draft | {name: model().method(name) for name in ("ngram", "sam_recycling")}


def matches(kind: str, text: str) -> bool:
    if kind in ("json", "blanks"):
        value = json.loads(text)
        kinds = value["kind"] in ("cat", "cow", "dog") and 0 <= value["legs"] <= 99 and len(value["name"]) <= 4
        compact = text == json.dumps(value, separators=(",", ":"), ensure_ascii=False) or "\\" in text
        return list(value) == ["name", "kind", "legs"] and kinds and (compact or kind == "blanks")
    if kind == "choice":
        return text in CHOICE
    pattern = {"regex": "(ab|cd){2,3}[0-9]{2}xyz", "grammar": r"the (one|two[0-9]{2})\."}[kind]
    return re.fullmatch(pattern, text) is not None


def test_answers_match_and_equal_plain_constrained_decoding_at_any_temperature() -> None:
    requests = [
        (kind, model().request("hello", SamplingParams(t, seed=3), max_new_tokens=90, structured_outputs=OUTPUTS[kind]))
        for kind, t in (("json", 0), ("json", 1.5), ("blanks", 1.5), ("regex", 1.5), ("choice", 0), ("grammar", 1.5))
    ]
    with unchecked():
        plain = model().engine().complete([r for _, r in requests])
        for method in methods().values():
            answers = model().engine(method).complete([r for _, r in requests])
            for (kind, request), expected, answer in zip(requests, plain, answers, strict=True):
                assert answer.finish_reason == "stop" and matches(kind, answer.text), answer.text
                if method.accept.same_seed or not request.sampling_params.temperature:
                    assert answer.tokens == expected.tokens
                assert kind != "json" or answer.statistics.tokens_per_pass > 1.5
    assert all(c.statistics.tokens_per_pass == 1 for c in plain)


def test_equal_outputs_are_compiled_once_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_compiler, "_CACHED", 2)
    one, two, three = (StructuredOutputs(regex=x) for x in ("x", "y", "z"))
    first = compiler().compile(one)
    assert compiler().compile(StructuredOutputs(regex="x")) is first
    compiler().compile(two)
    assert compiler().compile(one) is first
    compiler().compile(three)
    assert compiler().compile(one) is first
    assert compiler().compile(two) is not first


def test_a_state_allows_exactly_the_tokens_that_it_accepts() -> None:
    constraint = compiler().compile(StructuredOutputs(regex="ab?c"))
    codec = model().codec
    state: Any = constraint.start()
    for text, following, final in (("", "a", False), ("a", "bc", False), ("b", "c", False)):
        state = constraint.advance(state, codec.encode(text)[0]) if text else state
        allowed = np.flatnonzero(np.unpackbits(constraint.mask(state), bitorder="little"))
        assert {codec.decode([t]) for t in allowed.tolist()} == set(following)
        assert all((constraint.advance(state, t) is not None) == (t in allowed) for t in range(model().config.vocab))
        assert constraint.is_final(state) is final
    assert [list(tokens) for tokens in constraint.forced(state)] == [codec.encode("c")]
    end = constraint.advance(state, codec.encode("c")[0])
    assert constraint.is_final(end) and constraint.advance(end, codec.encode("c")[0]) is None
    assert constraint.advance(state, 10**6) is None


def test_a_choice_of_thousands_of_texts_holds_to_its_end() -> None:
    texts = tuple(f"value {i}" for i in range(3000))
    constraint = compiler().compile(StructuredOutputs(choice=texts))
    for text in (texts[7], texts[-1]):
        state = constraint.start()
        for token in model().codec.encode(text, add_special_tokens=False):
            assert np.unpackbits(constraint.mask(state), bitorder="little")[token]
            state = constraint.advance(state, token)
        assert np.unpackbits(constraint.mask(state), bitorder="little")[model().eos[0]]


def test_a_grammar_that_becomes_too_complex_is_an_error_and_lifts_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [f'r{i}: "{chr(97 + i % 26)}" "{i}"' for i in range(2500)]
    grammar = 'start: "x" more\nmore: ' + " | ".join(f"r{i}" for i in range(2500)) + "\n" + "\n".join(rules)
    constraint = compiler().compile(StructuredOutputs(grammar=grammar))
    with pytest.raises(ValueError, match="too complex"):
        constraint.mask(constraint.advance(constraint.start(), *model().codec.encode("x", add_special_tokens=False)))
    (completion,) = (
        model()
        .engine(model().method())
        .complete([Request([97], max_new_tokens=9, constraint=constraint)], raise_errors=False)
    )
    assert completion.finish_reason == "error" and "too complex" in str(completion.error)
    monkeypatch.setattr(structured_compiler, "_MASK_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"regex cannot be used: .* takes more than 0 s"):
        compiler().compile(StructuredOutputs(regex="[ab]{7}"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; found none"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice"),
        ({"choice": []}, "choice must hold one or more texts"),
        ({"json": '{"type":'}, "the JSON schema is no JSON: .* line 1 column 9"),
        ({"json": "[1]"}, "a JSON schema must be an object"),
        ({"json": {"a": {"properties": {"b": {"not": {}}}}}}, None),
        ({"json": {"properties": {"b": {"not": {"type": "null"}}}}}, r"\"not\".*\(not at #/properties/b\)"),
        (
            {"json": {"properties": {"b": {"items": {"type": "string", "pattern": "("}}}}},
            r"unclosed group \(pattern at #/pro"
            r"perties/b/items\)",
        ),
        ({"json": {"properties": {"b": 3}}}, r"\(properties/b at #\)"),
        ({"json": {"$ref": "#"}}, r"no text can match it \(\$ref at #\)"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum .3."),
        ({"json": "[" * 10**5}, "nested more than 64 levels deep"),
        ({"regex": "(a[b"}, r"the regex cannot be used: at 1\(8\): .*unclosed character class$"),
        ({"regex": "a" * 200_000}, "has 200000 characters; at most 131072 are allowed"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON only"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str | None) -> None:
    if sentence is None:
        compiler().compile(StructuredOutputs(**fields))
        return
    with pytest.raises(ValueError, match=sentence) as error:
        compiler().compile(StructuredOutputs(**fields))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_the_command_line_answers_by_schema_and_choice(tmp_path: Any) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    command = ("generate", "hello", "--model", tiny_target(), "--dtype", "float32", "--method", "ngram")
    assert matches("json", run_foretell(*command, "--json-schema", schema).stdout.strip())
    assert run_foretell(*command, "--choice", "yes", "--choice", "no").stdout.strip() in ("yes", "no")
    assert "unclosed character class" in expect_error(*command, "--regex", "(a[b")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "hello", "structured_outputs": {"regex": "[a-c]{3}"}, "min_tokens": 1}))
    found = run_foretell("generate", "--prompts", lines, "--model", tiny_target(), "--dtype", "float32", "--json")
    assert re.fullmatch("[a-c]{3}", json.loads(found.stdout)["text"])
