"""Loads the multi-token prediction layer of a checkpoint, which shares embedding and head with the model."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float

from foretell.model.block.decoder import Decoder, decoder_rope_tables
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.block.linear import Int8Linear, Linear, quantize_int8
from foretell.model.config.families import KINDS, family_of
from foretell.model.config.families.base import PredictionNames
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.stack import NativeStack
from foretell.model.load.build import build_block
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config, holds_prediction_alone
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import packable_block
from foretell.model.load.weights import DelegatedWeights, Weights
from foretell.model.matrices.stored import StoredMatrix
from foretell.model.run.mtp import MTPLayer, MTPModule
from foretell.model.run.network import Network

Tensor = torch.Tensor
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MOST_MODULES = 64  # that are looked for; no model has so many


class _LayerWeights(DelegatedWeights):
    """The tensors of the layers under the names of a model of these layers."""

    def __init__(self, weights: Weights, names: PredictionNames) -> None:
        super().__init__(weights)
        self._names = names

    def _name(self, name: str) -> str:
        return _LAYER.sub(lambda index: self._names.of_module(int(index[1])).layer, name, count=1)


def predicting_kinds(trained: bool = False) -> str:
    """Architectures whose checkpoints have such a layer; `trained`: one that can be trained here."""
    found = ((kind, family_of(kind).prediction(kind, 1)) for kind in KINDS)
    return ", ".join(kind for kind, names in found if names is not None and not (trained and names.before_norm))


def _beside(weights: Weights) -> Path | None:
    """The file that llama.cpp calls the layer of a model's file, `mtp-*.gguf` in the same folder; None: none."""
    file = next(iter(weights.files), None)
    files = [] if file is None or file.suffix != ".gguf" else sorted(file.parent.glob("mtp-*.gguf"))
    if len(files) > 1:
        raise ValueError(
            f"{file}: there are {len(files)} files with a layer of multi-token prediction beside it "
            f"({', '.join(each.name for each in files)}); name one with --draft-model"
        )
    return files[0] if files else None


def _of_file(path: Path, config: ModelConfig) -> Weights:
    """The weights of a file with the layer of this model alone."""
    file = GGUF(path)
    if not holds_prediction_alone(file):
        raise ValueError(f"{path}: mtp drafts with a layer of multi-token prediction, and this file is of another kind")
    own = gguf_config(file)
    for of_file, of_model, what in (
        (own.architecture, config.architecture, "the architecture"),
        (own.hidden, config.hidden, "the width"),
        (own.layers, config.layers, "the number of layers"),
        (own.vocab, config.vocab, "the size of the vocabulary"),
    ):
        if of_file != of_model:
            raise ValueError(
                f"{path}: a layer of multi-token prediction of another model: {what} is {of_file}, and {of_model} of "
                "the target"
            )
    return GGUFWeights(file, own, predicts=True)


def prediction_modules(names: PredictionNames, weights: Weights) -> list[PredictionNames]:
    """Names of the parts of the layers of a checkpoint, of which the first one has `names`.

    Raises:
        ValueError: their numbers have a gap, or they are several of an architecture that has one.
    """
    modules = [names.of_module(i) for i in range(_MOST_MODULES)]
    there = [weights.get(f"{each.layer}input_layernorm.weight") is not None for each in modules]
    count = max(there.index(False), 1)
    if any(there[count:]):
        raise ValueError(
            f"{weights.source}: its layers of multi-token prediction have a gap at {modules[count].layer}*; is the "
            "checkpoint complete?"
        )
    if count > 1 and not names.several:
        raise ValueError(
            f"{weights.source}: there are several layers of multi-token prediction ({names.layer}*, "
            f"{modules[1].layer}*), and how they follow one another is known of those of DeepSeek and GLM alone"
        )
    return modules[:count]


def prediction_config(config: ModelConfig, count: int) -> ModelConfig:
    """The configuration of a model of `count` layers of multi-token prediction."""
    experts = None if config.experts is None else replace(config.experts, layers=tuple(range(count)))
    return replace(config, layers=count, state=None, experts=experts)


def load_mtp(config: ModelConfig, weights: Weights, target: Network, file: Path | None = None) -> MTPLayer:
    """The multi-token prediction layer of a checkpoint for its model `target`, whose embedding and head it shares;
    `file`: a GGUF file with this layer alone. Where neither has it, it is looked for beside the model's GGUF file.

    Raises:
        ValueError: the architecture or the checkpoint has no such layer, or the model is not in memory as a whole.
    """
    names = family_of(config.architecture).prediction(config.architecture, config.layers)
    if names is None:
        raise ValueError(
            f"mtp drafts with the multi-token prediction layer of a checkpoint, and {config.architecture} has none; "
            f"architectures that have one: {predicting_kinds()}; name the directory of Gemma 4's assistant with "
            "--draft-model"
        )
    if file is None and weights.get(f"{weights.prediction_names(names).combine}.weight") is None:
        file = _beside(weights)
    if file is not None:
        weights = _of_file(file, config)
    names = weights.prediction_names(names)
    if not isinstance(target, Decoder | NativeDecoder):
        raise ValueError("mtp needs the whole model in memory; run it without a memory limit, or use another method")
    try:
        weights.matrix(f"{names.combine}.weight", config.hidden, 2 * config.hidden)
    except ValueError as error:
        raise ValueError(
            f"this checkpoint was published without its multi-token prediction layer ({error}); use another method"
        ) from error
    modules = prediction_modules(names, weights)
    own = replace(prediction_config(config, len(modules)), context=target.config.context)
    norms = [
        [
            RMSNorm(
                weights.require(f"{n}.weight", config.hidden).to(target.device), config.norm_eps, config.norm_offset
            )
            for n in (each.norm, each.embedding_norm, each.hidden_norm)
        ]
        for each in modules
    ]
    matrices = [weights.matrix(f"{each.combine}.weight", config.hidden, 2 * config.hidden) for each in modules]
    if names.before_norm:
        matrices = [StoredMatrix.of(matrix.widen().roll(config.hidden, 1)) for matrix in matrices]
    build = _native if isinstance(target, NativeDecoder) else _torch
    network, combine = build(own, _LayerWeights(weights, names), target, norms[0][0], matrices)
    parts = [MTPModule(each, *own_norms) for each, own_norms in zip(combine, norms, strict=True)]
    return MTPLayer(network, parts, config.layers + (not names.before_norm))


class PublishedLayer(NamedTuple):
    """A layer of a checkpoint in float32 on the CPU; norms with the offset of the architecture."""

    block: DecoderBlock
    combine: Float[Tensor, "d dd"]
    norm: Float[Tensor, " d"]
    embedding_norm: Float[Tensor, " d"]
    hidden_norm: Float[Tensor, " d"]


def layers_like(target: ModelConfig, count: int) -> ModelConfig:
    """The configuration of `count` layers of multi-token prediction for a target: those that its checkpoints have, else
    blocks like its last one.
    """
    published = family_of(target.architecture).prediction(target.architecture, target.layers)
    return prediction_config(target, count) if published else target.of_layers([target.layers - 1] * count)


def read_layers(config: ModelConfig, weights: Weights, names: PredictionNames | None) -> list[PublishedLayer]:
    """The layers of multi-token prediction of a checkpoint, with these names, to train them on; empty: there are none.

    Raises:
        ValueError: a tensor of them is missing, or they read the state before the target's final norm.
    """
    if names is None or weights.get(f"{names.combine}.weight") is None:
        return []
    if names.before_norm:
        raise ValueError(
            f"{weights.source}: the layer of multi-token prediction of {config.architecture} reads states that those "
            "that are trained here do not; draft with it as it is (--method mtp), or train another kind"
        )
    modules = prediction_modules(names, weights)
    own, layers = layers_like(config, len(modules)), _LayerWeights(weights, names)

    def norm(name: str) -> Float[Tensor, " d"]:
        return weights.require(f"{name}.weight", config.hidden).float() + config.norm_offset

    return [
        PublishedLayer(
            build_block(own, k, layers, torch.float32, torch.device("cpu")),
            weights.matrix(f"{each.combine}.weight", config.hidden, 2 * config.hidden).widen().float(),
            *(norm(name) for name in (each.norm, each.embedding_norm, each.hidden_norm)),
        )
        for k, each in enumerate(modules)
    ]


_Parts = tuple[Network, list[Callable[[Tensor], Tensor]]]


def _native(
    config: ModelConfig, weights: Weights, target: Network, norm: RMSNorm, matrices: Sequence[StoredMatrix]
) -> _Parts:
    assert isinstance(target, NativeDecoder)
    stack = NativeStack(config, [], target.precision, *decoder_rope_tables(config))
    outer = NativeDecoder.of_parts(config, target.embedding, stack, norm.weight.detach(), target.head)
    blocks = [stack.pack_block(i, packable_block(config, i, weights, target.precision)) for i in range(config.layers)]
    combine: list[Callable[[Tensor], Tensor]] = [
        NativeLinear(weights.round_matrix("the input of the layer", matrix), None, target.precision)
        for matrix in matrices
    ]
    return outer.with_blocks(blocks), combine


def _torch(
    config: ModelConfig, weights: Weights, target: Network, norm: RMSNorm, matrices: Sequence[StoredMatrix]
) -> _Parts:
    assert isinstance(target, Decoder)
    table, device = target.embedding.data, target.device
    blocks = [build_block(config, i, weights, table.dtype, device) for i in range(config.layers)]
    combine: list[Callable[[Tensor], Tensor]] = [Linear(m.widen().to(device, table.dtype)) for m in matrices]
    if isinstance(target.head, Int8Linear):
        for block in blocks:
            quantize_int8(block)
    return Decoder(config, table, blocks, norm, target.head), combine
