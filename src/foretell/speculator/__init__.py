"""Trained speculators on disk: our own checkpoints, those that other projects publish, and what is written for them."""

from pathlib import Path

from foretell.speculator.checkpoint import read_config


def is_speculator(reference: str) -> bool:
    """Whether a path names a directory with a trained speculator, as opposed to a language model."""
    folder = Path(reference).expanduser()
    return (folder / "config.json").is_file() and "kind" in read_config(folder)
