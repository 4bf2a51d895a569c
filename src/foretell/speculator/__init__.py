"""Trained speculators on disk: our own checkpoints, those that other projects publish, and what is written for them."""

from pathlib import Path

from foretell.speculator.checkpoint import read_config
from foretell.speculator.formats import find_format


def is_speculator(folder: Path) -> bool:
    """Whether a directory holds a trained speculator, ours or in a known format, as opposed to a language model."""
    return (folder / "config.json").is_file() and ("kind" in read_config(folder) or find_format(folder) is not None)
