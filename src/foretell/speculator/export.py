"""Writes speculators in the formats of other engines."""

from pathlib import Path

from foretell.speculator.formats import EXPORTS
from foretell.speculator.formats.base import ExportFormat, Verifier
from foretell.speculator.network.base import Speculator
from foretell.utils.names import unknown
from foretell.utils.paths import require_empty
from foretell.utils.unfinished import whole


def find_exports(name: str) -> tuple[ExportFormat, ...]:
    """The formats of this name, one for each kind of speculator.

    Raises:
        ValueError: there is none; the nearest name is suggested.
    """
    formats = tuple(e for e in EXPORTS if e.name == name)
    if not formats:
        raise unknown("format", name, sorted({e.name for e in EXPORTS}))
    return formats


def export(network: Speculator, verifier: Verifier, format_name: str, out: Path) -> None:
    """Write a speculator into a directory that is new or empty, atomically: the directory is written under another name
    and renamed when it is complete.

    Raises:
        ValueError: an unknown format, one that does not support the speculator, or a directory that is not empty.
    """
    formats = find_exports(format_name)
    format_ = next((f for f in formats if f.kind == network.kind), None)
    if format_ is None:
        supported = ", ".join(e.name for e in EXPORTS if e.kind == network.kind) or "none"
        raise ValueError(
            f"the format {format_name} is for speculators of kind {' or '.join(f.kind for f in formats)}, and this one "
            f"is of kind {network.kind}; formats for that kind: {supported}"
        )
    require_empty(out)
    with whole(out) as part:
        part.mkdir()
        format_.write(network, verifier, part)
