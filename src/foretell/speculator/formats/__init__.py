"""Checkpoints of other projects: one file per family, and the table of what is recognised."""

from collections.abc import Sequence
from pathlib import Path

from foretell.speculator.formats import draft_model, eagle, eagle_export, medusa, mlp
from foretell.speculator.formats.base import CheckpointFormat, ExportFormat
from foretell.speculator.formats.files import PublishedCheckpoint, open_checkpoint

FORMATS: Sequence[CheckpointFormat] = (
    medusa.AUTHORS,
    medusa.VLLM,
    mlp.IBM,
    eagle.SPECULATORS,
    eagle.EAGLE3,
    eagle.EAGLE1,
)
"""Every format that is read, the more particular ones first."""

EXPORTS: Sequence[ExportFormat] = (
    eagle_export.TO_SPECULATORS,
    eagle_export.TO_EAGLE3,
    eagle_export.TO_EAGLE1,
    medusa.TO_VLLM,
    mlp.TO_VLLM,
    draft_model.HF,
)
"""Every format that is written."""


def find_format(folder: Path) -> tuple[CheckpointFormat, PublishedCheckpoint] | None:
    """The format of what lies in a directory, with what was found in it; None: none that is known.

    Raises:
        ValueError: there is no configuration, or a file is damaged.
    """
    found = open_checkpoint(folder)
    format_ = next((f for f in FORMATS if f.matches(found)), None)
    return None if format_ is None else (format_, found)
