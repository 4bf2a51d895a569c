"""The warning of an answer: fields of its request that are not known, that have no effect, or that were changed."""

import logging
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from foretell.serve.protocol.base import Body

log = logging.getLogger(__name__)
WARNING_HEADER = "X-Foretell-Warning"
MAX_WARNED_FIELDS, MAX_FIELD_CHARS, MAX_CHARS = 10, 40, 1000
WITHOUT_EFFECT: Mapping[str, Collection[Any]] = {
    "container": (),
    "context_management": (),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "output_config.effort": (),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "thinking": ({"type": "disabled"},),
    "thinking_token_budget": (),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Fields that are read and change nothing here, with the values that ask for what is done anyway."""


def warning_of(body: Body) -> str:
    """The warning about a request, as printable ASCII of a bounded length; empty: there is none."""
    idle = [name for name, same in WITHOUT_EFFECT.items() if _asks(_value(body, name), same)]
    parts = (
        _named("unknown fields were ignored", body.unknown_fields),
        _named("fields have no effect on this server", idle),
        *body.notes,
    )
    return _printable("; ".join(part for part in parts if part), MAX_CHARS)


@lru_cache(maxsize=256)
def log_once(path: str, warning: str) -> None:
    """Log a warning about requests to a path; clients repeat themselves, and the log does not."""
    log.warning("request", extra={"fields": {"path": path, "warning": warning}})


def _value(body: Body, name: str) -> Any:
    """A field by its dotted name; None: it was not given."""
    value: Any = body
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _asks(value: Any, same: Collection[Any]) -> bool:
    """Whether a value asks for anything; an object of nulls does not."""
    if isinstance(value, Mapping) and all(inner is None for inner in value.values()):
        return False
    return value is not None and value not in same


def _named(what: str, names: Collection[str]) -> str:
    if not names:
        return ""
    shown = [_printable(name, MAX_FIELD_CHARS) for name in list(names)[:MAX_WARNED_FIELDS]]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{what}: {', '.join(shown)}{more}"


def _printable(text: str, most: int) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)[:most]
