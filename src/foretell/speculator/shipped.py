"""What ships inside the package: a folder per target, in it one per kind of speculator."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.speculator.checkpoint import CONFIG, read_config

SHIPPED = Path(__file__).parent.parent / "shipped"
"""Where it lies: `<target's name>/<any name>/config.json` and weights."""


@dataclass(frozen=True)
class Shipment:
    """A speculator that comes with the package; for a draft model the kind and the target stand under the key `foretell` of its config."""

    target: str
    """Name of the model it was trained for."""
    kind: str
    fingerprint: str
    folder: Path


def shipped(root: Path = SHIPPED) -> Iterator[Shipment]:
    """All that ships, in the order of the names."""
    for file in sorted(root.glob(f"*/*/{CONFIG}")):
        values: dict[str, Any] = read_config(file.parent)
        own = values if "kind" in values else values.get("foretell", {})
        fingerprint = str(own.get("target", {}).get("fingerprint", ""))
        yield Shipment(file.parent.parent.name, str(own.get("kind", "")), fingerprint, file.parent)


def find_shipped(kind: str, fingerprint: str, root: Path = SHIPPED) -> Path | None:
    """The folder of what ships of a kind for the target of this fingerprint; None: nothing does."""
    return next((s.folder for s in shipped(root) if (s.kind, s.fingerprint) == (kind, fingerprint)), None)
