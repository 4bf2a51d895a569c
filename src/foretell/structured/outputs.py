"""What a structured answer must match; names and meanings as vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.utils.json_values import nesting

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_MOST_CHARACTERS = 1 << 17
"""Of a schema, an expression, all choices or a grammar."""
_MOST_NESTING = 64
"""Levels of objects and arrays of a schema."""


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of `json` (a JSON schema, as text or as an object), `json_object` (any JSON object), `regex`,
    `choice` (one of some texts) and `grammar` (Lark, or GBNF with a rule `root`).

    `any_whitespace`: blanks and line ends are allowed between the tokens of JSON; `whitespace_pattern`: a regular
    expression of the blanks that are. By default JSON is compact: fewer tokens, and small models lose themselves in
    blanks.

    Raises:
        ValueError: none or several of them, or one is malformed or too large.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = "none" if not given else " and ".join(given)
            raise ValueError(f"structured outputs need exactly one of {', '.join(_KINDS)}; found {named}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a string, found {getattr(self, name)!r:.80}")
        if self.choice is not None and not _are_texts(self.choice):
            raise ValueError(f"choice must hold one or more texts that are not empty, found {self.choice!r:.80}")
        if self.whitespace_pattern is not None and self.kind not in ("json", "json_object"):
            raise ValueError(f"whitespace_pattern is for JSON only, and {self.kind} was asked for")
        if (size := len(self.text)) > _MOST_CHARACTERS:
            raise ValueError(f"the {self.kind} has {size} characters; at most {_MOST_CHARACTERS} are allowed")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """What the answer must match, as text: the schema, the expression, the choices as JSON, or the grammar.

        Raises:
            ValueError: the schema is no JSON, or nested too deeply.
        """
        if self.kind == "choice":
            return json.dumps(list(self.choice or ()), ensure_ascii=False)
        if self.kind in ("json", "json_object"):
            return json.dumps(self.schema, ensure_ascii=False)
        return str(getattr(self, self.kind))

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema.

        Raises:
            ValueError: it is no JSON, no schema, or nested too deeply.
        """
        if self.json_object:
            return {"type": "object"}
        schema: Any = self.json
        if isinstance(schema, str):
            if len(schema) > _MOST_CHARACTERS:
                raise ValueError(f"the json has {len(schema)} characters; at most {_MOST_CHARACTERS} are allowed")
            try:
                schema = json.loads(schema)
            except RecursionError:
                raise ValueError(f"the JSON schema is nested more than {_MOST_NESTING} levels deep") from None
            except ValueError as error:
                raise ValueError(f"the JSON schema is no JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise ValueError(f"a JSON schema must be an object, found {schema!r:.80}")
        if nesting(schema, _MOST_NESTING) > _MOST_NESTING:
            raise ValueError(f"the JSON schema is nested more than {_MOST_NESTING} levels deep")
        return schema


def _are_texts(values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and len(values) > 0
        and all(isinstance(v, str) and v for v in values)
    )
