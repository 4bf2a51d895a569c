"""Names of methods in other packages, and error messages for unknown names."""

from collections.abc import Iterable
from difflib import get_close_matches

METHODS = "foretell.methods"
"""Group of the entry points by which other packages add methods; each names an `Entry` of the catalogue."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not among `known`; it suggests the nearest known name."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}? Known: " if near else "; known: "
    return ValueError(f"unknown {kind} {name!r}{hint}{', '.join(names)}")
