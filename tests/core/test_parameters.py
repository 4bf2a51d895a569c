"""The table of generation parameters: one check and one sentence for the command line, Python, files and requests."""

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from command import expect_error, tiny_target
from foretell.api import Model
from foretell.cli.options import NO_PARAMETERS, Parameters, with_parameters
from foretell.cli.prompts import parse_line
from foretell.core.parameters import PARAMETERS, Parameter
from foretell.core.sampling import SamplingParams
from foretell.engine.request import Request, validate_request
from foretell.serve.defaults import read_defaults
from foretell.serve.errors import validation_error
from foretell.serve.fields import FIELDS
from foretell.serve.protocol.chat import ChatBody
from helpers import unchecked

WRONG: dict[str, list[tuple[Any, str]]] = {
    "max_new_tokens": [(0, "must be at least 1, found 0"), (2.5, "must be a whole number, found 2.5")],
    "temperature": [(-1.0, "must be at least 0, found -1.0"), ("hot", "must be a number, found 'hot'")],
    "top_k": [(-2, "must be at least -1, found -2"), (True, "must be a whole number, found True")],
    "top_p": [(0.0, "must be above 0 and at most 1, found 0.0"), (1.5, "must be above 0 and at most 1, found 1.5")],
    "min_p": [(-0.5, "must be at least 0 and at most 1, found -0.5"), (False, "must be a number, found False")],
    "repetition_penalty": [(0.0, "must be above 0, found 0.0")],
    "presence_penalty": [(2.5, "must be at least -2 and at most 2, found 2.5")],
    "frequency_penalty": [(-3.0, "must be at least -2 and at most 2, found -3.0")],
    "seed": [(2**64, f"must be at least {-(2**63)} and at most {2**64 - 1}, found {2**64}")],
    "stop": [([""], "must be a sequence of strings that are not empty, found ['']")],
    "stop_token_ids": [([-1], "must be a sequence of token ids, found [-1]")],
    "include_stop_str_in_output": [(1, "must be true or false, found 1")],
    "ignore_eos": [("yes", "must be true or false, found 'yes'")],
    "min_tokens": [(-1, "must be at least 0, found -1")],
    "bad_words": [(["a", ""], "must be a sequence of strings that are not empty, found ['a', '']")],
    "allowed_token_ids": [([], "must be a sequence of token ids that is not empty, found []")],
    "skip_special_tokens": [(0, "must be true or false, found 0")],
    "max_drafts": [(-1, "must be at least 0, found -1")],
}
REFUSED_BY_TYPE = "a number", "a whole number", "true or false"
"""What the parser of the command line refuses by itself."""


CASES = [(PARAMETERS[name], *case) for name, cases in WRONG.items() for case in cases]


@pytest.mark.parametrize(("parameter", "value", "predicate"), CASES, ids=lambda x: getattr(x, "name", str(x)[:20]))
def test_a_wrong_value_gets_the_same_sentence_everywhere(parameter: Parameter, value: Any, predicate: str) -> None:
    sentence = f"{parameter.name} {predicate}"
    with unchecked(), pytest.raises(ValueError) as in_python:
        if parameter.is_sampling:
            SamplingParams(**{parameter.name: value})
        elif parameter.name == "bad_words":
            parameter.read(value)
        else:
            validate_request(Request([1], **{parameter.name: value}), 10, 10)
    assert str(in_python.value) == sentence

    with unchecked(), pytest.raises(ValueError) as in_a_file:
        parse_line(json.dumps({"prompt": "x", parameter.name: value}).encode())
    assert str(in_a_file.value) == sentence

    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    outer, _, inner = parameter.field_name.partition(".")
    with pytest.raises(ValidationError) as in_a_body:
        ChatBody.model_validate_json(json.dumps(body | {outer: {inner: value} if inner else value}))
    error = validation_error(in_a_body.value)
    assert (error.status, error.param) == (400, parameter.field_name)
    assert error.message == f"{parameter.field_name} {predicate}"

    if parameter.help and not any(words in predicate for words in REFUSED_BY_TYPE) and value != []:
        given = [f"{parameter.option_name}={v}" for v in (value if parameter.many else [value])]
        shown = expect_error("generate", "x", "--model", tiny_target(), *given)
        assert shown == f"foretell: {parameter.option_name} {predicate}"


def test_other_commands_give_the_same_sentence() -> None:
    assert expect_error("chat", "--top-p", "2") == "foretell: --top-p must be above 0 and at most 1, found 2.0"
    sentence = "foretell: --temperature must be at least 0, found -1.0"
    assert expect_error("diffusion", "generate", "x", "--temperature", "-1") == sentence
    sentence = "foretell: --max-new-tokens must be at least 1, found 0"
    assert expect_error("assess", tiny_target(), "--max-new-tokens", "0") == sentence


@pytest.mark.parametrize("parameter", list(PARAMETERS.values()), ids=lambda p: p.name)
def test_defaults_are_those_of_python(parameter: Parameter) -> None:
    if parameter.is_sampling:
        assert getattr(SamplingParams(), parameter.name) == parameter.default
    else:
        assert inspect.signature(Model.request).parameters[parameter.name].default == parameter.default
    if parameter.name in {f.name for f in fields(Request)}:
        assert getattr(Request([1]), parameter.name) == parameter.default
    assert parameter.default is None or parameter.read(parameter.default) == parameter.default


def test_every_parameter_is_tried_here() -> None:
    assert WRONG.keys() == PARAMETERS.keys()


def test_every_sampling_parameter_is_in_the_table() -> None:
    """But for biases, and the tokens of bad words, which are given as texts."""
    own = {f.name for f in fields(SamplingParams)} - {"logit_bias", "bad_words"}
    assert own == {p.name for p in PARAMETERS.values() if p.is_sampling}


def test_every_parameter_of_a_request_reaches_the_engine() -> None:
    read_by_handlers = {"max_new_tokens", "seed"}
    assert {field.target for field in FIELDS} >= PARAMETERS.keys() - read_by_handlers
    assert set(PARAMETERS) - {"max_new_tokens", "max_drafts"} <= set(ChatBody.model_fields)


def test_a_single_text_stands_for_itself_and_tokens_are_taken_once() -> None:
    assert PARAMETERS["stop"].read("end") == ("end",)
    assert PARAMETERS["stop_token_ids"].read([3, 4, 3]) == (3, 4)


def test_all_tokens_are_kept_at_top_k_of_minus_one_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_defaults_of_a_checkpoint_are_checked_when_a_server_starts(tmp_path: Path) -> None:
    def read(**values: Any) -> dict[str, Any]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **values}))
        return read_defaults("auto", tmp_path, None)

    assert read(top_k=-1, top_p=0.5, max_new_tokens=20.0) == {
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 0.5,
        "max_new_tokens": 20,
    }
    with pytest.raises(ValueError, match=r"_config.json: top_p must be above 0 and at most 1, found 2; give another"):
        read(top_p=2)


def test_a_command_gets_the_values_of_its_options() -> None:
    app, values = typer.Typer(), dict[str, Any]()

    @app.command()
    @with_parameters(top_k=7)
    def command(parameters: Parameters = NO_PARAMETERS) -> None:
        values.update(parameters)

    defaults = {p.name: p.default for p in PARAMETERS.values() if p.help}
    assert CliRunner().invoke(app, []).exit_code == 0 and values == defaults | {"top_k": 7}
    given = ["--show-special-tokens", "--stop", "a", "--stop", "b", "--top-k", "3", "--include-stop"]
    assert CliRunner().invoke(app, given).exit_code == 0
    changed = {"skip_special_tokens": False, "stop": ("a", "b"), "top_k": 3, "include_stop_str_in_output": True}
    assert values == defaults | changed
