"""Structural tags as grammars."""

import json
import re
from collections.abc import Mapping
from typing import Any

from foretell.serve.protocol import structural_tag as tags
from foretell.serve.tools.syntax import literal, split_special
from foretell.utils.json_values import nesting
from foretell.utils.validation import parse_object, show, validate

_MOST_NESTING = 64
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")
"""A slash that is not escaped."""


def read_structural_tag(given: Any) -> tags.Format:
    """The format of a structural tag, which is an object or JSON text: `{"format": …}`, or `{"structures": […],
    "triggers": […]}`.

    Raises:
        ValueError: it is malformed.
    """
    value = parse_object(given, "structural_tag") if isinstance(given, str) else given
    if not isinstance(value, Mapping):
        raise ValueError(f"structural_tag must be an object with format, or with structures, found {show(value)}")
    if nesting(value, _MOST_NESTING) > _MOST_NESTING:
        raise ValueError(f"structural_tag is nested more than {_MOST_NESTING} levels deep")
    if "structures" in value:
        return validate(tags.Structures, value, "structural_tag").as_format()
    return validate(tags.StructuralTag, value, "structural_tag").format


class TagGrammar:
    """The Lark grammar (with llguidance's extensions) of a format.

    `special`: ids of the tokenizer's special tokens by text. `any_whitespace`: blanks are allowed in JSON.

    Raises:
        ValueError: any text stands where its end could not be found, or a tag has no trigger or several.
    """

    def __init__(self, format: tags.Format, special: Mapping[str, int], any_whitespace: bool = False) -> None:
        self._special, self._any_whitespace = special, any_whitespace
        self.schemas = list[Mapping[str, Any]]()
        """All JSON schemas in it."""
        self._rules = [r"TEXT: /(.|\n)*/"]
        start = self._write(format, last=True)
        self.text = "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _literal(self, text: str) -> str:
        return literal(text, self._special)

    def _write(self, format: tags.Format, last: bool) -> str:
        """An expression; `last`: the answer ends with it."""
        match format:
            case tags.ConstString():
                return self._rule(self._literal(format.value))
            case tags.JsonValue():
                return self._json({} if format.json_schema is True else format.json_schema)
            case tags.Pattern():
                pattern = _SLASH.sub(r"\1\\/", format.pattern).replace("\n", r"\n")
                return self._rule(f"/{pattern}/")
            case tags.Sequence():
                *others, final = format.elements
                return self._rule(" ".join([*(self._write(e, False) for e in others), self._write(final, last)]))
            case tags.Alternatives():
                return self._rule(" | ".join(self._write(e, last) for e in format.elements))
            case tags.Tag():
                return self._tag(format, format.begin, last)
            case tags.SeparatedTags():
                return self._separated(format, last)
            case _ if not last:
                raise ValueError(f"{format.type} must stand at the end of structural_tag, or before the end of a tag")
            case tags.AnyText():
                return "TEXT"
            case tags.TriggeredTags():
                return self._triggered(format)

    def _json(self, schema: Mapping[str, Any] | bool) -> str:
        if isinstance(schema, bool):
            raise ValueError("the JSON schema false matches nothing")
        self.schemas.append(schema)
        own = {**schema, "x-guidance": {"whitespace_flexible": self._any_whitespace}}
        return self._rule(f"%json {json.dumps(own)}")

    def _tag(self, tag: tags.Tag, begin: str, last: bool) -> str:
        """A tag from `begin` on."""
        if isinstance(tag.content, tags.AnyText) and tag.end:
            content = self._until(tag.end)
        else:
            content = f"{self._write(tag.content, last and not tag.end)} {self._literal(tag.end)}"
        return self._rule(f"{self._literal(begin)} {content}")

    def _until(self, end: str) -> str:
        """Any text up to and with the first `end`."""
        first, *rest = split_special(end, self._special)
        if first in self._special:
            return f"TEXT {self._literal(end)}"
        return f"{self._rule(f'TEXT {json.dumps(first)}', '[lazy]')} {self._literal(''.join(rest))}"

    def _separated(self, format: tags.SeparatedTags, last: bool) -> str:
        one = self._rule(" | ".join(self._tag(t, t.begin, last and not format.separator) for t in format.tags))
        several = one if format.stop_after_first else f"{one} ({self._literal(format.separator)} {one})*"
        return self._rule(several if format.at_least_one else f"({several})?")

    def _triggered(self, format: tags.TriggeredTags) -> str:
        by_trigger = dict[str, list[str]]()
        for tag in format.tags:
            triggers = [t for t in format.triggers if tag.begin.startswith(t)]
            if len(triggers) != 1:
                raise ValueError(
                    f"the tag {show(tag.begin)} must begin with one of the triggers, found {len(triggers)}"
                )
            by_trigger.setdefault(triggers[0], []).append(self._tag(tag, tag.begin[len(triggers[0]) :], last=False))
        tagged = [f"{self._until(trigger)} ({' | '.join(rules)})" for trigger, rules in by_trigger.items()]
        one = self._rule(" | ".join(tagged))
        if format.stop_after_first:
            return one if format.at_least_one else self._rule(f"{one} | TEXT")
        return self._rule(f"{one}{'+' if format.at_least_one else '*'} TEXT")
