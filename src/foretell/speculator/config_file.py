"""The configuration of a speculator, which is read without torch."""

from pathlib import Path
from typing import Any

from foretell.utils.validation import read_json

CONFIG = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of `config.json`.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no {CONFIG} here, so this is no speculator")
    return read_json(folder / CONFIG)
