"""Models with random weights in the shape of a published one: times of a pass depend on the shape only."""

from collections.abc import Sequence
from typing import get_args

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, models

from foretell.api import Model
from foretell.model import kernels as native
from foretell.model.block.linear import quantize_int8
from foretell.model.config.families import KINDS
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.load.build import build_decoder
from foretell.model.load.native import load_native, weight_dtype
from foretell.model.load.weights import Weights
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.network import Network
from foretell.roofline.model_configs import find_model
from foretell.testing import hash_name
from foretell.tokenizer.codec import TextCodec
from foretell.utils.names import unknown


class DeviceRandomWeights(Weights):
    """Gaussian matrices scaled by their input width, drawn on the device: 7B parameters take seconds on a GPU."""

    source = "random weights"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device

    def get(self, name: str) -> Float[torch.Tensor, "*shape"] | None:
        """The untied head; no other optional tensor exists."""
        return self.require(name, self._config.vocab, self._config.hidden) if name == "lm_head.weight" else None

    def require(self, name: str, *shape: int) -> Float[torch.Tensor, "*shape"]:
        """A tensor of this shape, drawn from a seed that depends on the name."""
        if "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(hash_name(name))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0.0, 1.0 if "embed" in name else shape[-1] ** -0.5, generator=generator)


def random_network(config: ModelConfig, precision: Precision, device: torch.device) -> Network:
    """A random network with what `foretell.load` uses on this device: native kernels, CUDA graphs or plain torch."""
    dtype = weight_dtype(precision)
    weights = DeviceRandomWeights(config, dtype, device)
    if device.type == "cpu" and native.available() and NativeDecoder.supports(config):
        return load_native(config, weights, precision)
    decoder = build_decoder(config, weights, dtype, device)
    if precision == "int8":
        quantize_int8(decoder)
    return GraphedDecoder(decoder) if device.type == "cuda" and config.experts is None else decoder


def random_models(shape: str, precisions: Sequence[str], device: torch.device) -> list[Model]:
    """A random model per precision in the shape of a built-in model of the roofline, such as `llama-2-7b`.

    Raises:
        ValueError: an unknown shape or precision, or an architecture that the decoder does not run.
    """
    known: dict[str, Precision] = {p: p for p in get_args(Precision)}
    if wrong := [p for p in precisions if p not in known]:
        raise unknown("dtype", wrong[0], known)
    name, config = find_model(shape)
    if config.architecture not in KINDS:
        raise ValueError(f"--shape {shape}: the decoder does not run {config.architecture}; it runs {', '.join(KINDS)}")
    vocabulary = {str(token): token for token in range(config.vocab)}
    codec = TextCodec(Tokenizer(models.WordLevel(vocabulary, unk_token="0")))
    return [Model(name, config, codec, random_network(config, known[p], device), p, eos=()) for p in precisions]
