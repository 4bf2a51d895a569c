"""Reads and validates JSON, with one wording of errors for the whole package."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

Model = TypeVar("Model", bound=BaseModel)
_SHOWN = 60
"""Characters of a wrong value that an error message shows."""
PREDICATE = "predicate"
"""Type of an error of pydantic whose message goes on after the name of the key: "must be at least 0, found -1"."""
MAX_INTEGER = 2**31 - 1
"""Largest integer of a configuration: sizes, counts and token ids of models are smaller."""


class FrozenModel(BaseModel):
    """Immutable data; unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def parse_json(text: str | bytes, source: str = "", remedy: str = "") -> Any:
    """The value of a JSON text. Error messages begin with `source` and end with `remedy`, what to do.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, or a string with a lone surrogate.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        return from_json(decoded)
    except UnicodeDecodeError as error:
        raise ValueError(_sentence(source, f"not UTF-8 text (byte {error.start})", remedy)) from error
    except ValueError as error:
        raise ValueError(_sentence(source, f"not valid JSON ({error})", remedy)) from error


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: the file cannot be read, or contains no JSON object.
    """
    return parse_object(_read(path), str(path), remedy)


def parse_object(text: str | bytes, source: str = "", remedy: str = "") -> dict[str, Any]:
    """The JSON object of a text; see `parse_json`.

    Raises:
        ValueError: the text is no JSON, or its value is no object.
    """
    value = parse_json(text, source, remedy)
    if not isinstance(value, dict):
        raise ValueError(_sentence(source, f"a JSON object was expected, found {show(value)}", remedy))
    return value


def validate(kind: type[Model], value: object, source: str = "", remedy: str = "") -> Model:
    """The value as a pydantic model.

    Raises:
        ValueError: it is invalid; the message names the key and what was found.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError(_sentence(source, explain(error), remedy)) from error


def validate_json(kind: type[Model], text: bytes, source: str = "", remedy: str = "") -> Model:
    """The JSON text as a pydantic model, parsed and validated by pydantic in one step.

    Raises:
        ValueError: not JSON, or invalid.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(_sentence(source, explain(error), remedy)) from error


def read_model(kind: type[Model], path: Path, remedy: str = "") -> Model:
    """The contents of a JSON file as a pydantic model.

    Raises:
        ValueError: the file cannot be read, is no JSON, or is invalid.
    """
    return validate_json(kind, _read(path), str(path), remedy)


def explain(error: ValidationError) -> str:
    """The first error of pydantic: key, reason and what was found."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == PREDICATE:
        return f"{where} {message}"
    if first["type"] == "json_invalid":
        return f"not valid JSON ({first['ctx']['error']})"
    if first["type"] == "model_type":
        message = "Input should be an object"
    if first["type"] != "value_error":
        message = message[0].lower() + message[1:]
        message += "" if first["type"] == "missing" else f", found {show(first['input'])}"
    return f"{where}: {message}" if where else message


def show(value: object) -> str:
    """A value for an error message, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses the `repr` of an integer of thousands of digits.
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


class Fields:
    """Typed access to the keys of a configuration of another program. A key that is null counts as missing.

    Every method takes the names of a key in order of preference. It raises `ValueError` with the source, the key and
    what was found if the key is missing without a default, or if its value has another type or is out of range.
    """

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw, self.source, self._prefix = raw, source, prefix

    def has(self, *names: str) -> bool:
        """Whether one of the keys is present."""
        return any(self.raw.get(name) is not None for name in names)

    def require(self, *names: str) -> None:
        """Check that all of these keys are present."""
        missing = [repr(self._prefix + name) for name in names if not self.has(name)]
        if missing:
            raise ValueError(f"{self.source}: the configuration has no {', '.join(missing)}; is it complete?")

    def integer(self, *names: str, default: int | None = None, least: int = 0, most: int = MAX_INTEGER) -> int:
        """An integer within bounds; 8.0 is read as 8."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value) or value % 1:
            raise self.wrong(name, "an integer", value)
        if not least <= value <= most:
            raise self.wrong(name, f"at least {least}" if value < least else f"at most {most}", value)
        return int(value)

    def number(self, *names: str, default: float | None = None, least: float = -math.inf) -> float:
        """A finite number."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise self.wrong(name, "a finite number", value)
        if value < least:
            raise self.wrong(name, f"at least {least}", value)
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(*names, default=default)
        if value <= 0:
            raise self.wrong(names[0], "above zero", value)
        return value

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """True or false."""
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """A string."""
        name, value = self._find(names, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """A list of strings; empty where it is missing."""
        return tuple(self._list(names, str, "a list of strings"))

    def integers(self, *names: str) -> tuple[int, ...]:
        """A list of integers, or a single one; empty where it is missing."""
        return tuple(self._list(names, int, "an integer or a list of integers"))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        self.require(name)
        values = self._list((name,), (int, float), "a list of finite numbers")
        if not isinstance(self.raw[name], list) or not all(map(_finite, values)):
            raise self.wrong(name, "a list of finite numbers", self.raw[name])
        return tuple(map(float, values))

    def fields(self, *names: str) -> "Fields":
        """A nested object; empty where it is missing."""
        name, value = self._find(names, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return Fields(value, self.source, f"{self._prefix}{name}.")

    def wrong(self, name: str, wanted: str, value: object) -> ValueError:
        """The error for a key with an invalid value."""
        return ValueError(f"{self.source}: {self._prefix}{name} should be {wanted}, found {show(value)}")

    def objects(self, *names: str) -> tuple["Fields", ...]:
        """A list of objects; empty where it is missing."""
        name, values = names[0], self._list(names, Mapping, "a list of objects")
        return tuple(Fields(one, self.source, f"{self._prefix}{name}.{i}.") for i, one in enumerate(values))

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        if default is None:
            keys = " or ".join(repr(self._prefix + name) for name in names)
            raise ValueError(f"{self.source}: the configuration has no {keys}; is it complete?")
        return names[0], default

    def _list(self, names: tuple[str, ...], kind: type | tuple[type, ...], wanted: str) -> list[Any]:
        name, value = self._find(names, [])
        values = list(value) if isinstance(value, list | tuple) else [value]
        for one in values:
            large = isinstance(one, int) and abs(one) > MAX_INTEGER
            if not isinstance(one, kind) or isinstance(one, bool) or large:
                raise self.wrong(name, wanted, value)
        return values


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from error


def _sentence(source: str, message: str, remedy: str) -> str:
    return f"{source}{': ' if source else ''}{message}{'; ' if remedy else ''}{remedy}"
