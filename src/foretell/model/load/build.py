"""Builds a decoder in torch from the tensors of a checkpoint."""

from concurrent.futures import ThreadPoolExecutor

import torch

from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.block.layer_inputs import LayerInputs
from foretell.model.block.linear import Linear
from foretell.model.block.modules import from_weights
from foretell.model.block.weights import read_block
from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.load.weights import Weights

LAYER_INPUTS_TABLE = "model.embed_tokens_per_layer.weight"
LAYER_INPUTS_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_INPUTS_NORM = "model.per_layer_projection_norm.weight"
OUTER_NAMES = (LAYER_INPUTS_TABLE, LAYER_INPUTS_PROJECTION, LAYER_INPUTS_NORM)
"""Tensors outside of the blocks that only some models have."""


def build_decoder(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the decoder of a configuration from a checkpoint, in `dtype` on `device`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    require_last_layer(config, weights)
    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
        outer = pool.submit(lambda: build_without_blocks(config, weights, dtype, device))
        blocks = list(pool.map(lambda i: build_block(config, i, weights, dtype, device), range(config.layers)))
    shell = outer.result()
    return Decoder(config, shell.embedding.data, blocks, shell.norm, shell.head, layer_inputs=shell.layer_inputs)


def require_last_layer(config: ModelConfig, weights: Weights) -> None:
    """Fail early on a configuration with too many layers.

    Raises:
        ValueError: the checkpoint does not have the last one.
    """
    norm = "input_layernorm" if config.pre_norms else "post_attention_layernorm"
    name = family_of(config.architecture).name(f"{norm}.weight")
    weights.require(f"model.layers.{config.layers - 1}.{name}", config.hidden)


def build_without_blocks(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a decoder with embedding, final norm and head, and no blocks."""
    embedding = weights.require("model.embed_tokens.weight", config.vocab, config.hidden).to(device, dtype)
    inputs = None if config.layer_inputs is None else _layer_inputs(config, weights, dtype, device)
    norm = _norm(config, weights, f"{family_of(config.architecture).final_norm}.weight", config.hidden, device)
    head = None if config.tied else weights.head(config.vocab, config.hidden)
    own = None if head is None else Linear(head.to(device, dtype))
    return Decoder(config, embedding, [], norm, own, layer_inputs=inputs)


def build_block(
    config: ModelConfig, i: int, weights: Weights, dtype: torch.dtype, device: torch.device
) -> DecoderBlock:
    """Build block `i`.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    return from_weights(config, i, read_block(config, i, weights), dtype, device)


def layer_inputs_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Rows of the table of per-layer inputs, its columns, and how many of these one layer reads."""
    assert config.layer_inputs is not None
    return config.layer_inputs.vocab, config.layers * config.layer_inputs.width, config.layer_inputs.width


def _layer_inputs(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> LayerInputs:
    """The table and the projection of per-layer inputs."""
    vocab, total, width = layer_inputs_sizes(config)
    table = weights.require(LAYER_INPUTS_TABLE, vocab, total).to(device, dtype)
    projection = weights.require(LAYER_INPUTS_PROJECTION, total, config.hidden).to(device, dtype)
    norm = _norm(config, weights, LAYER_INPUTS_NORM, width, device)
    return LayerInputs(table, Linear(projection), norm, width)


def _norm(config: ModelConfig, weights: Weights, name: str, width: int, device: torch.device) -> RMSNorm:
    return RMSNorm(weights.require(name, width).to(device), config.norm_eps, config.norm_offset)
