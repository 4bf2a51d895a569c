"""Trained speculators: networks, checkpoints, the formats of other projects, installed packages, and export."""

from pathlib import Path

from foretell.speculator.checkpoint import read_config
from foretell.speculator.formats import find_format
from foretell.speculator.formats.gguf import is_drafter


def is_speculator(folder: Path) -> bool:
    """Whether a directory holds a trained speculator, in Foretell's or another known format, and not a language
    model; or a GGUF file a drafter.
    """
    if folder.is_file():
        return is_drafter(folder)
    return (folder / "config.json").is_file() and ("kind" in read_config(folder) or find_format(folder) is not None)
