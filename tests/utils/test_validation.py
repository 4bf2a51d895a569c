"""JSON and configurations: every invalid value is one sentence with the name of its source."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from foretell.cli.prompts import parse_line
from foretell.utils.validation import Fields, parse_json, read_json, read_model, validate

DEEP = "[" * 100_000


class Sizes(BaseModel):
    hidden: int = Field(ge=1)
    name: str = ""


@pytest.mark.parametrize(
    "text", ["{", "", DEEP, DEEP + "]" * 100_000, "1" * 5000, '"\\ud800"', '"\\udc00x"', "{} {}", b'"\xff"']
)
def test_what_is_no_json_is_refused_with_its_name(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^file\.json: not (valid JSON|UTF-8).*; delete it$") as error:
        parse_json(text, "file.json", "delete it")
    assert "\n" not in str(error.value)
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"a\.json: "):
        read_json(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json: not valid JSON"):
        read_model(Sizes, tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"not (valid JSON|UTF-8)"):
        parse_line(text if isinstance(text, bytes) else text.encode())


def test_json_is_what_the_standard_library_reads() -> None:
    for value in ({"a": [1, 2.5, None, True, "é🙂"]}, 10**30, "x" * 1000, math.inf):
        assert parse_json(json.dumps(value)) == value


def test_files_that_are_not_there_or_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.json: cannot be read \(no such file or directory\)"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"a\.json: a JSON object was expected, found \[1\]; try another"):
        read_json(tmp_path / "a.json", "try another")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"hidden": "x"}, r"^c\.json: hidden: input should be a valid integer.*, found 'x'$"),
        ({"hidden": 0}, "hidden: input should be greater than or equal to 1, found 0"),
        ({}, "hidden: field required$"),
        ({"hidden": 1, "name": [1] * 1000}, "name: input should be a valid string, found .{60}…"),
        ([], r"c\.json: input should be .*, found \[\]"),
    ],
)
def test_a_validation_error_names_the_key_and_what_was_found(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(Sizes, value, "c.json")


def test_keys_are_typed_bounded_and_named() -> None:
    raw = {"a": 8.0, "b": {"c": [1, 2]}, "d": None, "e": [{"f": 1.5}], "g": "text", "h": False}
    read = Fields(raw, "c.json")
    assert (
        read.integer("a") == 8 and read.fields("b").integers("c") == (1, 2) and read.objects("e")[0].number("f") == 1.5
    )
    assert read.integer("d", default=3) == 3 and read.integer("z", "a") == 8 and read.text("g") == "text"
    assert read.flag("h") is False and read.integers("z") == () and read.fields("z").raw == {}
    wrong = (
        (lambda: read.integer("h"), "c.json: h should be an integer, found False"),
        (lambda: read.integer("a", most=7), "c.json: a should be at most 7, found 8.0"),
        (lambda: read.integer("z", "y"), "c.json: the configuration has no 'z' or 'y'"),
        (lambda: read.fields("b").number("c"), r"c.json: b\.c should be a finite number, found \[1, 2\]"),
        (lambda: read.objects("e")[0].integer("f"), r"c.json: e\.0\.f should be an integer, found 1.5"),
        (lambda: read.require("a", "d", "z"), "has no 'd', 'z'"),
    )
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
