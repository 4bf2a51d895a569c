"""Checkpoint formats of other projects: one file per family, and the tables of all formats."""

from collections.abc import Sequence
from pathlib import Path

from foretell.speculator.formats import (
    dflash,
    dflash_export,
    draft_model,
    eagle,
    eagle_export,
    gguf,
    masked_diffusion,
    medusa,
    mlp,
    mtp,
    p_eagle,
    redrafter,
)
from foretell.speculator.formats.base import CheckpointFormat, ExportFormat
from foretell.speculator.formats.files import PublishedCheckpoint, open_checkpoint, refuse_quantized_checkpoint

FORMATS: Sequence[CheckpointFormat] = (
    masked_diffusion.PUBLISHED,
    medusa.AUTHORS,
    medusa.VLLM,
    mlp.IBM,
    dflash.SPECULATORS,
    dflash.AUTHORS,
    mtp.SPECULATORS,
    p_eagle.LIBRARY,
    p_eagle.FLAT,
    redrafter.AUTHORS,
    eagle.SPECULATORS,
    eagle.EAGLE3,
    eagle.EAGLE1,
)
"""Formats that are read, the more specific ones first."""

EXPORTS: Sequence[ExportFormat] = (
    eagle_export.TO_SPECULATORS,
    eagle_export.TO_EAGLE3,
    eagle_export.TO_EAGLE1,
    p_eagle.TO_SPECULATORS,
    dflash_export.TO_AUTHORS,
    dflash_export.TO_SPECULATORS,
    medusa.TO_VLLM,
    mlp.TO_VLLM,
    redrafter.TO_AUTHORS,
    gguf.TO_EAGLE3,
    gguf.TO_DFLASH,
    draft_model.HF,
    draft_model.HF_PARD,
    mtp.TO_SPECULATORS,
    mtp.HF,
    mtp.ASSISTANT,
)
"""Formats that are written."""


def find_format(folder: Path) -> tuple[CheckpointFormat, PublishedCheckpoint] | None:
    """The format of the checkpoint in a directory or a GGUF file, and the checkpoint; None: no known format.

    Raises:
        ValueError: there is no configuration, a file is damaged, or a checkpoint of a known format is quantised.
    """
    files = gguf.open_gguf(folder) if folder.is_file() else open_checkpoint(folder)
    format_ = next((f for f in FORMATS if f.matches(files)), None)
    if format_ is None:
        return None
    if not folder.is_file():
        refuse_quantized_checkpoint(files)
    return format_, files
