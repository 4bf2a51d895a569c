"""Draft models, those of PARD too, written as Hugging Face models."""

from dataclasses import replace
from pathlib import Path

import torch

from foretell.model.block.decoder import Decoder
from foretell.model.block.linear import Linear
from foretell.model.load.pard2 import write_state_projection
from foretell.speculator.formats.base import ExportFormat, Verifier
from foretell.speculator.hf_writer import write_hf
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.pard import PardNetwork


def _write(network: Speculator, verifier: Verifier, folder: Path) -> None:
    assert isinstance(network, DraftNetwork)
    decoder = network.to_decoder(network.dtype)
    # Other engines need a logit for every token: those outside the draft vocabulary use the target's rows.
    head = network.full_lm_head.detach().to(network.dtype)
    mask_token = network.config.mask_token if isinstance(network, PardNetwork) else None
    config = replace(decoder.config, tied=torch.equal(head, decoder.embedding), mask_token=mask_token)
    whole = Decoder(config, decoder.embedding, list(decoder.blocks), decoder.norm, Linear(head))  # type: ignore[arg-type]
    projection = network.state_projection if isinstance(network, PardNetwork) else None
    more = write_state_projection(folder, projection, network.target_info.layers) if projection else {}
    write_hf(folder, whole, verifier.codec, network.dtype, **more)


HF = ExportFormat("hf", "draft_model", _write)
HF_PARD = ExportFormat("hf", "pard", _write)
