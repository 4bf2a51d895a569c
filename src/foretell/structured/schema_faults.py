"""Finds the keywords of a JSON schema that an error is about, by compiling the schema without them."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MOST_TRIALS = 100
_SECONDS = 0.5
"""Bounds of the search: a schema that takes long to refuse is not compiled again and again."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value holds schemas by names of the user's own."""


def find_faults(schema: Mapping[str, Any], reason: str, refuse: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """The innermost keywords without which the schema is no longer refused for this reason, such as `pattern at
    #/properties/a`; an empty list if none is found.

    `refuse`: the reason for which a schema is refused; empty if it compiles.
    """
    search = _Search(schema, reason, refuse)
    return [_describe(path) for path in search.innermost(())]


def keyword_places(schema: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The keys of a schema with the JSON pointers of the objects that hold them."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            yield str(key), _pointer(path)
            yield from keyword_places(value, (*path, str(key)))
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from keyword_places(value, (*path, str(i)))


class _Search:
    def __init__(self, schema: Mapping[str, Any], reason: str, refuse: Callable[[Mapping[str, Any]], str]) -> None:
        self._schema, self._reason, self._refuse = schema, reason, refuse
        self._trials, self._end = _MOST_TRIALS, time.monotonic() + _SECONDS

    def innermost(self, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Paths of the innermost keys below a path that are at fault."""
        value = _at(self._schema, path)
        if isinstance(value, list):
            return [fault for i in range(len(value)) for fault in self.innermost((*path, str(i)))]
        if not isinstance(value, Mapping):
            return []
        faults = [(*path, key) for key in value if self._is_at_fault((*path, key))]
        return [inner for fault in faults for inner in self.innermost(fault) or [fault]]

    def _is_at_fault(self, path: tuple[str, ...]) -> bool:
        if not self._trials or time.monotonic() > self._end:
            return False
        self._trials -= 1
        return self._refuse(_without(self._schema, path)) != self._reason


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[int(key) if isinstance(value, list) else key]
    return value


def _without(value: Any, path: tuple[str, ...]) -> Any:
    """A copy without the key at a path."""
    key, *rest = path
    if isinstance(value, list):
        return [_without(each, tuple(rest)) if i == int(key) else each for i, each in enumerate(value)]
    if rest:
        return {k: _without(v, tuple(rest)) if k == key else v for k, v in value.items()}
    return {k: v for k, v in value.items() if k != key}


def _describe(path: tuple[str, ...]) -> str:
    """The keyword and the place of the schema that holds it; a name of the user's own follows its keyword."""
    own = 2 if len(path) > 1 and path[-2] in _NAMED else 1
    return f"{'/'.join(path[-own:])} at {_pointer(path[:-own])}"


def _pointer(path: tuple[str, ...]) -> str:
    return "/".join(("#", *(key.replace("~", "~0").replace("/", "~1") for key in path)))
