"""Looking a name up in a table, with a hint where it is nearly right."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def look_up(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of that name, letter case and underscores forgiven.

    Raises:
        ValueError: no such entry; says which one may have been meant.
    """
    key = name.strip().lower().replace("_", "-")
    if key in table:
        return table[key]
    near = [n for n in table if n.startswith(key)][:3] if key else []
    near = near or difflib.get_close_matches(key, table, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(table)}"
    raise ValueError(f"there is no {what} called {name!r}; {hint}")
