"""Loads the multi-token prediction layer of a checkpoint, which shares embedding and head with the model."""

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from foretell.model.block.decoder import Decoder, RMSNorm, decoder_rope_tables
from foretell.model.block.linear import Int8Linear, Linear, quantize_int8
from foretell.model.config.families import KINDS, family_of
from foretell.model.config.families.base import PredictionNames
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.stack import NativeStack
from foretell.model.load.build import build_block
from foretell.model.load.native import packable_block
from foretell.model.load.weights import DelegatedWeights, Weights
from foretell.model.matrices.stored import StoredMatrix
from foretell.model.run.mtp import MTPLayer
from foretell.model.run.network import Network

Tensor = torch.Tensor
_FIRST_LAYER = "model.layers.0."


class _LayerWeights(DelegatedWeights):
    """The tensors of the layer under the names of a model of one layer."""

    def __init__(self, weights: Weights, names: PredictionNames) -> None:
        super().__init__(weights)
        self._names = names

    def _name(self, name: str) -> str:
        if name.startswith(_FIRST_LAYER):
            return name.replace(_FIRST_LAYER, self._names.layer, 1)
        return name


def _known() -> list[str]:
    """Architectures whose checkpoints have such a layer."""
    return [kind for kind in KINDS if family_of(kind).prediction(kind, 1) is not None]


def load_mtp(config: ModelConfig, weights: Weights, target: Network) -> MTPLayer:
    """The multi-token prediction layer of a checkpoint for its model `target`, whose embedding and head it shares.

    Raises:
        ValueError: the architecture or the checkpoint has no such layer, or the model is not in memory as a whole.
    """
    names = family_of(config.architecture).prediction(config.architecture, config.layers)
    if names is None:
        raise ValueError(
            f"mtp drafts with the multi-token prediction layer of a checkpoint, and {config.architecture} has none; "
            f"architectures that have one: {', '.join(_known())}"
        )
    names = weights.prediction_names(names)
    if not isinstance(target, Decoder | NativeDecoder):
        raise ValueError("mtp needs the whole model in memory; run it without a memory limit, or use another method")
    try:
        matrix = weights.matrix(f"{names.combine}.weight", config.hidden, 2 * config.hidden)
    except ValueError as error:
        raise ValueError(
            f"this checkpoint was published without its multi-token prediction layer ({error}); use another method"
        ) from error
    further = re.sub(r"\d+(?=\.$)", lambda index: str(int(index[0]) + 1), names.layer)
    if weights.get(f"{further}input_layernorm.weight") is not None:
        raise ValueError(
            f"this checkpoint has several layers of multi-token prediction ({names.layer}*, {further}*), which engines "
            "chain in different ways; mtp supports one: use another method"
        )
    experts = None if config.experts is None else replace(config.experts, layers=(0,))
    single = replace(config, layers=1, state=None, experts=experts, context=target.config.context)
    view = _LayerWeights(weights, names)
    norm, *norms = (
        RMSNorm(weights.require(f"{n}.weight", config.hidden).to(target.device), config.norm_eps, config.norm_offset)
        for n in (names.norm, names.embedding_norm, names.hidden_norm)
    )
    build = _native if isinstance(target, NativeDecoder) else _torch
    network, combine = build(single, view, target, norm, matrix)
    return MTPLayer(network, combine, norms[0], norms[1], config.layers, names.norms_states)


_Parts = tuple[Network, Callable[[Tensor], Tensor]]


def _native(config: ModelConfig, weights: Weights, target: Network, norm: RMSNorm, matrix: StoredMatrix) -> _Parts:
    assert isinstance(target, NativeDecoder)
    stack = NativeStack(config, [], target.precision, *decoder_rope_tables(config))
    outer = NativeDecoder.of_parts(config, target.embedding, stack, norm.weight.detach(), target.head)
    block = stack.pack_block(0, packable_block(config, 0, weights, target.precision))
    combine = NativeLinear(weights.round_matrix("the input of the layer", matrix), None, target.precision)
    return outer.with_blocks([block]), combine


def _torch(config: ModelConfig, weights: Weights, target: Network, norm: RMSNorm, matrix: StoredMatrix) -> _Parts:
    assert isinstance(target, Decoder)
    table, device = target.embedding.data, target.device
    block = build_block(config, 0, weights, table.dtype, device)
    combine = Linear(matrix.widen().to(device, table.dtype))
    if isinstance(target.head, Int8Linear):
        quantize_int8(block)
    return Decoder(config, table, [block], norm, target.head), combine
