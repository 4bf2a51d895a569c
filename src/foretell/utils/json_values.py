"""Walks through JSON values: objects, arrays, strings and other scalars."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def texts(value: Any) -> Iterator[str]:
    """All strings in a value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner)


def map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """The value with a function applied to all strings in it."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {map_texts(key, function): map_texts(inner, function) for key, inner in value.items()}
    return [map_texts(x, function) for x in value] if isinstance(value, list | tuple) else value


def nesting(value: object, most: int) -> int:
    """Levels of objects and arrays; counting stops beyond `most`."""
    depth, level = 0, [value]
    while level and depth <= most:
        inner = [list(v.values()) if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list)]
        depth, level = depth + bool(inner), [x for values in inner for x in values]
    return depth
