"""Field types and the base of all request bodies."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, WithJsonSchema

from foretell.utils.validation import show

BIAS_LIMIT = 100.0
"""Largest absolute value of a logit bias (OpenAI)."""


class Body(BaseModel):
    """A request body. Unknown fields are allowed, ignored, and named in a header of the answer."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), allow_inf_nan=False)

    _ignored: list[str] = PrivateAttr(default_factory=list)
    _notes: list[str] = PrivateAttr(default_factory=list)

    def ignore(self, names: Iterable[str]) -> None:
        """Count fields of parts that have no type as unknown ones."""
        self._ignored += names

    def note(self, text: str) -> None:
        """Say in the warning of the answer how the request was changed."""
        self._notes.append(text)

    def share_notes(self, other: "Body") -> None:
        """Note in the warning of another body, from which this one was made."""
        self._notes = other._notes

    @property
    def notes(self) -> tuple[str, ...]:
        """How the request was changed, each once."""
        return tuple(dict.fromkeys(self._notes))

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of the fields that no server feature reads, each once; a dot stands before those of an object, or of
        the objects of a list, in a field. A field that is null asks for nothing.
        """
        return tuple(dict.fromkeys((*_unknown(self, ""), *self._ignored)))


def _unknown(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, Body):
        extra = value.model_extra or {}
        yield from (f"{place}{name}" for name, given in extra.items() if given is not None)
        for name, inner in value:
            if name not in extra:
                yield from _unknown(inner, f"{place}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for inner in value:
            yield from _unknown(inner, place)


def _token_ids(value: Any) -> list[int]:
    """Check a list of token ids by hand: pydantic would report every wrong element."""
    if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
        raise ValueError(f"a list of token ids was expected, found {show(value)}")
    return value


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"an object of biases by token id was expected, found {show(value)}")
    biases = {}
    for token, bias in value.items():
        if not str(token).isascii() or not str(token).isdecimal() or len(str(token)) > len(str(2**31)):
            raise ValueError(f"{show(token)} is no token id")
        if type(bias) not in (int, float) or not -BIAS_LIMIT <= bias <= BIAS_LIMIT:
            raise ValueError(f"the bias of token {token} must lie between -100 and 100, found {show(bias)}")
        biases[int(token)] = float(bias)
    return biases


def _prompt(value: Any) -> list[str] | list[list[int]]:
    """A completion's prompts as a list: of texts, or of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(x, str) for x in value):
            return value
        if all(type(x) is int for x in value):
            return [_token_ids(value)]
        if all(isinstance(x, list) and x for x in value):
            return [_token_ids(x) for x in value]
    raise ValueError(
        f"a string, a list of strings, a list of token ids or a list of lists of token ids was expected, not empty, "
        f"found {show(value)}"
    )


TokenIds = Annotated[
    list[int],
    BeforeValidator(_token_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_bias),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -BIAS_LIMIT, "maximum": BIAS_LIMIT}}
    ),
]
_INTEGERS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _INTEGERS,
                {"type": "array", "items": _INTEGERS, "minItems": 1},
            ]
        }
    ),
]
