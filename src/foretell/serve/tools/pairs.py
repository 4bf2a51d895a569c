"""Reads arguments that are written as keys and values, not as JSON, from a text that arrives in parts."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from foretell.serve.tools.syntax import Pairs, overlap, resolved, types_of

_NAMES = {"true": True, "false": False, "null": None}
_PYTHON_NAMES = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(true|false|null)\b""", re.DOTALL)


class PairReader:
    """Turns pairs into the text of a JSON object, piece by piece; where the text is cut makes no difference.

    A text is passed on as it arrives where the schema allows nothing else; other values when they are complete. What
    is no pair is left out. `schema`: of the arguments.
    """

    def __init__(self, pairs: Pairs, schema: Mapping[str, Any] | None) -> None:
        self._pairs = pairs
        self._schema = schema or {}
        properties = self._schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._key, self._close = re.compile(pairs.key), re.compile(pairs.close)
        self._begun, self._count = False, 0
        self._ends: tuple[str, ...] = ()
        """Of the value that is being read; empty: it is a literal, or there is none."""
        self._in_value, self._is_streamed, self._value_begun, self._types = False, False, False, {"string"}

    def read(self, text: str, last: bool) -> tuple[str, int, bool]:
        """JSON, the number of characters that were read, and whether the arguments are complete. `last`: no further
        text follows, so that an object that ends between pairs is closed.
        """
        out, at = "" if self._begun else "{", 0
        self._begun = True
        while True:
            if self._in_value:
                more, used = self._value(text[at:], last)
                out, at = out + more, at + used
                if self._in_value and last and self._pairs.quote:
                    return f"{out}{self._closed(text[at:])}}}", len(text), True
                if self._in_value:
                    return out, len(text) if last else at, False
            key, close = self._next(text, at)
            if close is not None and (key is None or close.start() <= key.start()):
                return f"{out}}}", close.end(), True
            if key is None:
                skipped = self._skip(text, at)
                if skipped == at:
                    return (f"{out}}}", len(text), True) if last else (out, at, False)
                at = skipped
                continue
            if key.end() == len(text) and not last and not self._pairs.ends:
                return out, at, False
            out, at = out + self._begin(key), key.end()

    def _next(self, text: str, at: int) -> tuple[re.Match[str] | None, re.Match[str] | None]:
        """The next key and the next end; between the marks of a raw value there may be anything."""
        if self._pairs.ends:
            return self._key.search(text, at), self._close.search(text, at)
        return self._key.match(text, at), self._close.match(text, at)

    def _skip(self, text: str, at: int) -> int:
        """The position behind a literal without a key, once it is complete."""
        if self._pairs.ends:
            return at
        end = self._literal_end(text, at)
        return at if end < 0 or end == at else end + (text[end] == ",")

    def _begin(self, key: re.Match[str]) -> str:
        name, kind = key[1].strip(), key[2] if self._key.groups > 1 else None
        if kind is None:
            self._types = types_of(resolved(self._properties.get(name), self._schema))
        else:
            self._types = {"string" if kind == "true" else "json"}
        self._in_value, self._value_begun, self._ends = True, False, self._pairs.ends
        self._is_streamed = bool(self._ends) and self._types == {"string"}
        self._count += 1
        return ("" if self._count == 1 else ", ") + f"{_json(name)}: " + ('"' if self._is_streamed else "")

    def _value(self, text: str, last: bool) -> tuple[str, int]:
        """JSON of a value, and the number of characters that were read."""
        quote = self._pairs.quote
        if not self._ends and quote and not self._is_streamed:
            if quote.startswith(text[: len(quote)]) and len(text) < len(quote) and not last:
                return "", 0
            if text.startswith(quote):
                self._ends, self._is_streamed, self._value_begun = (quote,), True, True
                more, used = self._raw(text[len(quote) :])
                return f'"{more}', len(quote) + used
        return self._raw(text) if self._ends else self._literal(text, last)

    def _closed(self, text: str) -> str:
        """The end of a value that the end of the answer cuts, where quotes have marks of their own; as in vLLM."""
        if self._is_streamed:
            return '"'
        quote = self._pairs.quote
        text = text[: len(text) - overlap(text, quote)].strip()
        return _json(self._parsed(text + quote * (text.count(quote) % 2)))

    def _raw(self, text: str) -> tuple[str, int]:
        """A value up to its end mark."""
        hits = [(at, i) for i, end in enumerate(self._ends) if (at := text.find(end)) >= 0]
        lines = self._pairs.lines
        if hits:
            at, which = min(hits)
            value = text[:at]
            if lines:
                value = value.removesuffix("\n")
                value = value if self._value_begun else value.removeprefix("\n")
            self._in_value = False
            used = at + (len(self._ends[which]) if which == 0 else 0)
            return (f'{_inner(value)}"' if self._is_streamed else _json(coerced(value, self._types))), used
        if not self._is_streamed:
            return "", 0
        value = text[: len(text) - max(overlap(text, end) for end in self._ends)]
        if lines and value.endswith("\n") and (self._value_begun or len(value) > 1):
            value = value[:-1]
        elif lines and value == "\n":
            return "", 0
        used = len(value)
        if lines and value and not self._value_begun:
            value = value.removeprefix("\n")
        self._value_begun = self._value_begun or used > 0
        return _inner(value), used

    def _literal(self, text: str, last: bool) -> tuple[str, int]:
        end = self._literal_end(text, 0)
        if end >= 0:
            self._in_value = False
            return _json(self._parsed(text[:end].strip())), end
        if last and not self._pairs.quote and text[:1] in ("'", '"'):
            for cut in range(len(text), len(text) - 12, -1):
                try:
                    return _json(ast.literal_eval(f"{text[:cut]}{text[0]}"))[:-1], len(text)
                except (ValueError, SyntaxError):
                    continue
        return "", 0

    def _literal_end(self, text: str, at: int) -> int:
        """Where a literal ends: before a comma or a bracket that was not opened in it; -1: not in this text."""
        depth, mark = 0, self._pairs.quote
        while at < len(text):
            char = text[at]
            if mark and text.startswith(mark, at):
                closing = text.find(mark, at + len(mark))
                if closing < 0:
                    return -1
                at = closing + len(mark)
                continue
            if char == '"' or (char == "'" and not mark):
                at = _string_end(text, at)
                if at < 0:
                    return -1
                continue
            if char in "{[(":
                depth += 1
            elif char in "}])" and depth:
                depth -= 1
            elif not depth and char in ",)}]":
                return at
            at += 1
        return -1

    def _parsed(self, text: str) -> Any:
        """The value of a literal; its text if it is none."""
        if self._pairs.quote:
            return _Quoted(text, self._pairs.quote).value() if text[:1] in ("{", "[") else coerced(text, self._types)
        names = {"true": "True", "false": "False", "null": "None"}
        try:
            value = ast.literal_eval(_PYTHON_NAMES.sub(lambda m: m[1] or names[m[2]], text))
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return _json_or_text(text)


class _Quoted:
    """A nested value whose texts stand between two marks, and whose keys may have none."""

    def __init__(self, text: str, quote: str) -> None:
        self._pieces = re.findall(
            rf'{re.escape(quote)}.*?{re.escape(quote)}|"(?:[^"\\]|\\.)*"|[{{}}\[\],:]|[^{{}}\[\],:"<]+|<',
            text,
            re.DOTALL,
        )
        self._quote, self._at = quote, 0

    def value(self) -> Any:
        """The value from here on."""
        piece = self._take()
        if piece == "{":
            pairs = dict[str, Any]()
            while self._more("}"):
                key = str(self._scalar(self._take(), as_text=True))
                if self._peek() == ":":
                    self._take()
                pairs[key] = self.value()
            return pairs
        if piece == "[":
            values = list[Any]()
            while self._more("]"):
                values.append(self.value())
            return values
        return self._scalar(piece)

    def _peek(self) -> str:
        while self._at < len(self._pieces) and not self._pieces[self._at].strip():
            self._at += 1
        return self._pieces[self._at] if self._at < len(self._pieces) else ""

    def _take(self) -> str:
        piece = self._peek()
        self._at += 1
        return piece

    def _more(self, closing: str) -> bool:
        """Whether another member follows."""
        while self._peek() == ",":
            self._take()
        if self._peek() not in (closing, ""):
            return True
        self._take()
        return False

    def _scalar(self, piece: str, as_text: bool = False) -> Any:
        if piece.startswith(self._quote):
            return piece[len(self._quote) : -len(self._quote)]
        return piece.strip().strip('"') if as_text else _json_or_text(piece.strip())


def coerced(text: str, types: set[str]) -> Any:
    """The value of a text for a parameter of these types, the first that fits, as vLLM orders them; else the text."""
    plain = text.strip()
    if "null" in types and plain.lower() in ("null", "none"):
        return None
    if types & {"integer", "number"} and re.fullmatch(r"[+-]?\d+", plain):
        return int(plain)
    if "number" in types and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", plain):
        value = float(plain)
        if value - value == 0:
            return int(value) if value == int(value) else value
    if "boolean" in types and plain.lower() in ("true", "false", "1", "0"):
        return plain.lower() in ("true", "1")
    if types & {"object", "array", "json"} or "string" not in types:
        return _json_or_text(text)
    return text


def _json_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, RecursionError):
        return _NAMES.get(text, text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _inner(text: str) -> str:
    return _json(text)[1:-1]


def _string_end(text: str, at: int) -> int:
    """The position behind a string that begins at a position; -1: it does not end in this text."""
    quote = text[at]
    match = re.compile(rf"{quote}(?:[^{quote}\\]|\\.)*{quote}", re.DOTALL).match(text, at)
    return -1 if match is None else match.end()
