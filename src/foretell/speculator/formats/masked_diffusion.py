"""Published masked diffusion models as drafters of an autoregressive model with the same tokenizer."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.diffusion.config import is_diffusion, read_diffusion
from foretell.model.diffusion.weights import read_decoder
from foretell.speculator.config_file import CONFIG
from foretell.speculator.formats.base import CheckpointFormat, ConvertedCheckpoint, target_info
from foretell.speculator.formats.files import PublishedCheckpoint
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.masked_diffusion import MaskedDiffusionConfig


def _read(files: PublishedCheckpoint, target: TargetInfo, embedding_and_head: EmbeddingAndHead) -> ConvertedCheckpoint:
    """The model with its own embedding and head."""
    read = read_diffusion(files.config, str(files.folder / CONFIG))
    decoder = read_decoder(files.folder, read, torch.float32, torch.device("cpu"))
    config = MaskedDiffusionConfig(
        target=target_info(files, target, read.model.hidden, read.model.vocab),
        model=replace(read.model, tied=False),
        mask_token=read.mask,
        shifted=read.shifted,
        block=read.block,
        own_head=True,
        own_embedding=True,
    )
    tensors: Mapping[str, torch.Tensor] = {
        **{f"blocks.{name}": t for name, t in decoder.blocks.state_dict().items()},
        "norm.weight": decoder.norm.weight,
        "mask_embedding": decoder.embedding[read.mask],
        "own_embedding": decoder.embedding,
        "head": decoder.head.weight,
    }
    return ConvertedCheckpoint(config, tensors)


PUBLISHED = CheckpointFormat("masked diffusion", lambda files: is_diffusion(files.config), _read)
