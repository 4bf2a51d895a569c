"""Reads the beginning of a call that is written as a JSON object, from a text that may not be complete yet."""

import json
import re
from collections.abc import Container
from typing import NamedTuple

from foretell.serve.protocol.tools import NAME_PATTERN

_BLANKS = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]+")
_ARGUMENTS = ("arguments", "parameters")
_OTHER = ("type", "id", "tool_call_id")
_NAME_KEYS = {"tool_name": "name"}
"""What some models call the name."""


class IncompleteError(Exception):
    """More text is needed. `name`: that of the call, if it is complete."""

    name = ""


class MalformedError(Exception):
    """No further text makes this a call."""


class Head(NamedTuple):
    """The name of a call; `arguments` and the end of the object, or where the arguments begin."""

    name: str
    at: int
    arguments: str | None = None


class ContainerEnd:
    """Finds the end of a JSON object or array in a text that arrives in parts. Brackets are counted, not matched."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def find(self, text: str, start: int = 0) -> int:
        """The position behind the end, or -1: it is not in this part."""
        for at in range(start, len(text)):
            char = text[at]
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return -1


def read_head(text: str, at: int, known: Container[str] | None) -> Head:
    """The head of the call whose object begins at a position. `known`: names that are calls; None: every name is.

    Raises:
        IncompleteError: the text ends before it.
        MalformedError: this is no call.
    """
    members = dict[str, str]()
    try:
        return _read_members(text, _expect(text, at, "{"), known, members)
    except IncompleteError as error:
        error.name = members.get("name", "")
        raise


def _read_members(text: str, at: int, known: Container[str] | None, members: dict[str, str]) -> Head:
    while True:
        key, at = _string(text, at)
        key = _NAME_KEYS.get(key, key)
        at = skip_blanks(text, _expect(text, at, ":"))
        name = members.get("name")
        if key in _ARGUMENTS and name is not None and text[at : at + 1] == "{":
            return Head(name, at)
        if key not in ("name", *_ARGUMENTS, *_OTHER) or key in members:
            raise MalformedError
        start, at = at, _value_end(text, at)
        members["arguments" if key in _ARGUMENTS else key] = _text(text[start:at], key)
        if key == "name" and not _is_call(members["name"], known):
            raise MalformedError
        at = skip_blanks(text, at)
        if text[at : at + 1] == ",":
            at += 1
        else:
            return _complete(members, _expect(text, at, "}"))


def skip_blanks(text: str, at: int) -> int:
    """The position of the next character that is no blank."""
    match = _BLANKS.match(text, at)
    assert match is not None
    return match.end()


def _is_call(name: str, known: Container[str] | None) -> bool:
    return re.fullmatch(NAME_PATTERN, name) is not None if known is None else name in known


def _complete(members: dict[str, str], at: int) -> Head:
    if "name" not in members:
        raise MalformedError
    return Head(members["name"], at, members.get("arguments", "{}"))


def _text(value: str, key: str) -> str:
    """The value of a member: of a string its text; of arguments that are null an empty object."""
    if value.startswith('"'):
        try:
            return str(json.loads(value, strict=False)).encode().decode()  # No half of a surrogate pair.
        except ValueError:
            raise MalformedError from None
    if key == "name":
        raise MalformedError
    return "{}" if value == "null" else value


def _expect(text: str, at: int, char: str) -> int:
    at = skip_blanks(text, at)
    if at == len(text):
        raise IncompleteError
    if text[at] != char:
        raise MalformedError
    return at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    start = _expect(text, at, '"') - 1
    match = _STRING.match(text, start)
    if match is None:
        raise IncompleteError
    return _text(match[0], ""), match.end()


def _value_end(text: str, at: int) -> int:
    if at == len(text):
        raise IncompleteError
    if text[at] == '"':
        return _string(text, at)[1]
    if text[at] in "{[":
        end = ContainerEnd().find(text, at)
        if end < 0:
            raise IncompleteError
        return end
    match = _SCALAR.match(text, at)
    if match is None:
        raise MalformedError
    if match.end() == len(text):
        raise IncompleteError
    return match.end()
