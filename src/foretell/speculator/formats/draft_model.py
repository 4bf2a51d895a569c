"""Draft models written as Hugging Face models."""

from dataclasses import replace
from pathlib import Path

import torch

from foretell.model.decoder import Decoder
from foretell.model.linear import Linear
from foretell.speculator.formats.base import ExportFormat, Verifier
from foretell.speculator.hf_writer import write_hf
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.draft_model import DraftNetwork


def _write(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, DraftNetwork)
    drafts = network.to_decoder(network.dtype)
    # Engines want a score for every token: those that a reduced vocabulary lacks get the target's.
    head = network.full_lm_head.detach().to(network.dtype)
    config = replace(drafts.config, tied=torch.equal(head, drafts.embedding))
    whole = Decoder(config, drafts.embedding, list(drafts.blocks), drafts.norm, Linear(head))  # type: ignore[arg-type]
    write_hf(folder, whole, verifier.codec, network.dtype)


HF = ExportFormat("hf", "draft_model", _write)
