"""Loads masked diffusion models from directories."""

from dataclasses import dataclass

import torch

from foretell.model.config.readers.values import eos_token_ids
from foretell.model.diffusion.config import DiffusionConfig, read_diffusion
from foretell.model.diffusion.predictor import MaskPredictor
from foretell.model.diffusion.weights import read_decoder
from foretell.model.load.network import parse_device
from foretell.model.load.reference import resolve_reference
from foretell.tokenizer.codec import TextCodec, from_directory
from foretell.utils.names import unknown
from foretell.utils.validation import Fields, read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class DiffusionModel:
    """A masked diffusion model with its tokenizer."""

    name: str
    config: DiffusionConfig
    predictor: MaskPredictor
    codec: TextCodec
    eos: tuple[int, ...]
    """Tokens that end an answer."""


def load_diffusion(reference: str, dtype: str = "float32", device: str = "cpu") -> DiffusionModel:
    """Load a masked diffusion model: a directory, or a hub id that is on this machine.

    `dtype`: float32 or bfloat16, of weights and activations.

    Raises:
        ValueError: an unknown dtype or device, a model of another kind, or a damaged checkpoint.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    path = resolve_reference(reference)
    file = path / "config.json"
    if path.is_file():
        raise ValueError(
            f"{reference}: a masked diffusion model was asked for, and a file holds an autoregressive one; decode it "
            "with foretell generate, or adapt it with foretell train masked_diffusion"
        )
    if not file.is_file():
        raise ValueError(f"{reference}: no config.json here; give the directory of a masked diffusion model")
    raw = read_json(file, "download it again")
    if raw.get("kind") == "masked_diffusion":
        raise ValueError(f"{reference}: the drafter of a training; the model that it belongs to is in {path / 'model'}")
    config = read_diffusion(raw, str(file))
    decoder = read_decoder(path, config, DTYPES[dtype], parse_device(device))
    predictor = MaskPredictor(decoder, config.mask, config.shifted, config.block)
    eos = config.model.eos
    generation = path / "generation_config.json"
    if generation.is_file():
        eos += eos_token_ids(Fields(read_json(generation), str(generation)))
    return DiffusionModel(reference, config, predictor, from_directory(path), tuple(sorted(set(eos))))
