"""Look-up of names in a table, with suggestions for unknown names."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
_MOST_NAMES = 16
"""Names that a message lists at most."""


def look_up(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of that name; letter case is ignored, and underscores count as hyphens.

    Raises:
        ValueError: no such entry; the message suggests similar names.
    """
    key = name.strip().lower().replace("_", "-")
    if key in table:
        return table[key]
    near = [n for n in table if n.startswith(key)][:3] if key else []
    near = near or difflib.get_close_matches(key, table, 3, 0.5)
    more = f" and {len(table) - _MOST_NAMES} others" if len(table) > _MOST_NAMES else ""
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(list(table)[:_MOST_NAMES])}{more}"
    raise ValueError(f"there is no {what} called {name!r}; {hint}")
