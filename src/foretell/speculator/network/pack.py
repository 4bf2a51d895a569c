"""Packs a trained network for drafting on a CPU: its matrices in the format of the native kernels."""

import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import nn

from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import RMSNorm
from foretell.model.block.modules import to_weights
from foretell.model.block.rope import rope_tables
from foretell.model.block.spec import BlockWeights, GatedWeights, LinearWeights
from foretell.model.block.weights import map_matrices
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.drafts import BlockDraftWeights, EagleWeights, NativeBlockDrafts, NativeEagle
from foretell.model.kernels.embedding import NativeEmbedding
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.mlp_speculator import NativeStage, NativeStages
from foretell.model.kernels.row_ops import rms_norm
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.structures import Precision
from foretell.model.load.rounding import round_to_blocks
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.model.matrices.stored import Matrix, StoredMatrix
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.cached_layers import EXTRA_POSITIONS, CachedLayersNetwork
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.eagle import Eagle3
from foretell.speculator.network.exits import Exits
from foretell.speculator.network.layer import Eagle3FirstLayer, EagleLayer
from foretell.speculator.network.mlp_speculator import NORM_EPS, MLPSpeculator
from foretell.speculator.network.p_eagle import PEagle

S = TypeVar("S", bound=Speculator)
DraftPrecision = Literal[Precision, "int4"]
"""`int4`: weights of four bits with a scale and a minimum per 32 inputs (Q4_1), and int8 activations."""


@dataclass(frozen=True)
class _Format:
    """How the matrices of a network are stored."""

    precision: Precision
    kind: Kind | None = None
    """Blocks that matrices are rounded to; None: they are packed as they are."""

    @staticmethod
    def of(precision: DraftPrecision) -> "_Format":
        """The format of a precision."""
        return _Format("int8-activations", "Q4_1") if precision == "int4" else _Format(precision)

    def matrix(self, weight: Matrix) -> Matrix:
        """A weight [outputs, inputs] as it is packed; it is not rounded if its rows are no whole blocks."""
        if isinstance(weight, StoredMatrix) or self.kind is None or weight.shape[1] % BLOCKS[self.kind][0]:
            return weight
        return round_to_blocks(StoredMatrix.of(weight), self.kind)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        """A packed linear layer."""
        return NativeLinear(self.matrix(weight), bias, self.precision)


class PackedLinear(nn.Module):
    """A linear layer on the native kernels; float32 in and out, whatever the weight's precision."""

    def __init__(self, linear: NativeLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        flat = x.reshape(-1, x.shape[-1]).float().contiguous()
        return self.linear(flat).view(*x.shape[:-1], self.linear.outputs)


class PackedNorm(nn.Module):
    """An RMS norm on the native kernels, float32 in and out."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight.detach().float(), norm.eps

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Normalise and scale the last axis."""
        return rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self._eps).view(x.shape)


def pack_network(network: S, precision: DraftPrecision = "int4") -> S:
    """A copy of the network with every `nn.Linear` and its output matrix packed; the network itself where the kernels
    do not run or do not support its dtype.

    All other tensors are float32, shared with the network where they are float32 already. A packed network can be
    neither trained nor saved. The output for a row does not depend on how many rows share the call.
    """
    head = network.lm_head
    unsupported = head.device.type != "cpu" or head.dtype == torch.float64 or not native.available()
    if unsupported or network.packed_head is not None:
        return network
    packed, form = shallow_copy(network), _Format.of(precision)
    stacked: nn.Module | None = None
    if isinstance(packed, CachedLayersNetwork):
        packed.native_stack = _pack_layers(packed, form)
        stacked = packed.layers if packed.native_stack else None
    packed.packed_head, packed.packed_precision = form.linear(packed.lm_head), precision
    if isinstance(packed, Eagle3):
        packed.native = _pack_eagle3(packed, form)
    _replace_modules(packed, form, stacked)
    for module in packed.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(parameter.detach().float(), requires_grad=False))
    if isinstance(packed, DFlash):
        packed.native = _pack_dflash(packed)
    if isinstance(packed, MLPSpeculator) and not packed.config.own_embedding:
        stages = [_pack_stage(packed, i) for i in range(packed.stages)]
        table, scale = packed.get_buffer("_embedding"), packed.embedding_scale
        packed.native = NativeStages(stages, table, scale, packed.token_of)
    return packed


def pack_decoder(decoder: Decoder, precision: DraftPrecision) -> NativeDecoder:
    """A torch decoder on the kernels, its head in the same precision as its blocks.

    Raises:
        ValueError: the kernels do not support the architecture.
    """
    form = _Format.of(precision)
    if form.kind is None:
        return NativeDecoder(decoder, form.precision)
    blocks = [map_matrices(to_weights(block), lambda path, matrix: form.matrix(matrix)) for block in decoder.blocks]
    stack = NativeStack(decoder.config, blocks, form.precision, decoder.rope_tables, decoder.local_rope_tables)
    dtype = torch.bfloat16 if decoder.embedding.dtype == torch.bfloat16 else torch.float32
    embedding = NativeEmbedding(StoredMatrix.of(decoder.embedding.detach()), dtype, decoder.config.embedding_scale)
    head = form.linear(decoder.head.weight, decoder.head.bias)
    return NativeDecoder.of_parts(decoder.config, embedding, stack, decoder.norm.weight.detach(), head)


@dataclass(frozen=True)
class ExitHead:
    """An exit on the native kernels: a norm, and the output matrix with the exit's map in it."""

    norm: Float[torch.Tensor, " d"]
    head: NativeLinear


def pack_exit(network: Exits, exit_: int, precision: DraftPrecision) -> ExitHead | None:
    """An exit whose map is part of its head; None where the kernels do not run or it is not linear after its norm."""
    head = network.lm_head
    unsupported = head.device.type != "cpu" or head.dtype == torch.float64 or not native.available()
    if unsupported or network.config.inner or network.softcap or network.packed_head is not None:
        return None
    rows = head.detach().float()
    if network.config.maps:
        rows = rows @ network.maps[exit_].get_parameter("weight").detach().float()
    norm = network.norms[exit_].get_parameter("weight").detach().float()
    return ExitHead(norm, _Format.of(precision).linear(rows))


def describe_packed(label: str, network: Speculator) -> str:
    """What drafts, and the precision of its packed matrices."""
    return f"{label}, {network.packed_precision} weights" if network.packed_precision else label


def shallow_copy(network: S) -> S:
    """New modules that hold the same tensors."""
    tensors = [
        *network.parameters(),
        *network.buffers(),
        *(v for v in vars(network).values() if isinstance(v, torch.Tensor)),
    ]
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def _pack_stage(network: MLPSpeculator, i: int) -> NativeStage:
    """A stage as one kernel call, from layers that are packed already."""
    shared, norm = i % len(network.token), network.norm[i % len(network.norm)]
    layers = network.project[min(i, len(network.project) - 1)], network.token[shared], network.output[shared]
    project, token, output = (_linear(layer) for layer in layers)
    head = network.packed_head
    assert head is not None
    return NativeStage(
        (project, token, output, head), (norm.get_parameter("weight"), norm.get_parameter("bias")), NORM_EPS
    )


def _linear(layer: nn.Module) -> NativeLinear:
    assert isinstance(layer, PackedLinear)
    return layer.linear


def _block(layer: EagleLayer, form: _Format) -> BlockWeights:
    """The record of a layer as it is packed."""
    attention, norm = layer.self_attn, layer.post_attention_layernorm.weight
    vectors: dict[str, Any] = {n: v if isinstance(v, torch.Tensor) else v.weight for n, v in attention.vectors.items()}
    weights = BlockWeights(
        # Ignored in a layer without an input norm.
        attention_norm=norm if layer.input_layernorm is None else layer.input_layernorm.weight,
        qkv=LinearWeights((attention.qkv_proj.weight,), attention.qkv_proj.bias),
        output=LinearWeights((attention.o_proj.weight,)),
        mlp_norm=norm,
        mlp=GatedWeights(
            LinearWeights(tuple(layer.mlp.gate_up_proj.weight.chunk(2))),
            LinearWeights((layer.mlp.down_proj.weight,)),
        ),
        **vectors,
    )
    return map_matrices(weights, lambda path, matrix: form.matrix(matrix))


def _pack_layers(network: CachedLayersNetwork, form: _Format) -> NativeStack | None:
    """The network's layers on the kernels; None where these do not support them."""
    config = network.config.decoder_config
    known = all(type(layer) in (EagleLayer, Eagle3FirstLayer) for layer in network.layers)
    if not known or not NativeStack.supports(config):
        return None
    blocks = [_block(layer, form) for layer in network.layers if isinstance(layer, EagleLayer)]
    tables = rope_tables(network.config.rope, config.head_dim, network.config.context, EXTRA_POSITIONS)
    return NativeStack(config, blocks, form.precision, tables)


def _pack_eagle3(network: Eagle3, form: _Format) -> NativeEagle | None:
    """The whole network on the kernels; None where these do not support it."""
    first, own, head, config = network.layers[0], network.embedding, network.packed_head, network.config
    if network.native_stack is None or config.norm_before_fc or network.softcap:
        return None
    assert isinstance(first, Eagle3FirstLayer) and head is not None
    norms, fuse = network.fc_norm, PackedLinear(form.linear(network.fc.weight, network.fc.bias))
    network.add_module("fc", fuse)
    weights = EagleWeights(
        embedding=network.get_buffer("_embedding") if own is None else own,
        embedding_scale=network.embedding_scale if own is None else 1.0,
        fuse=fuse.linear,
        state_norms=None if norms is None else torch.stack([norm.get_parameter("weight") for norm in norms]),
        embedding_norm=first.input_layernorm.weight,
        feature_norm=first.hidden_norm.weight,
        norm_before_residual=first.norm_before_residual,
        norm_output=config.norm_output,
        final_norm=network.norm.weight,
        head=head,
        token_of=network.token_of,
        mask=(network.mask, network.fuse(network.mask_states)) if isinstance(network, PEagle) else None,
    )
    return NativeEagle(network.native_stack, weights)


def _pack_dflash(network: DFlash) -> NativeBlockDrafts | None:
    """The whole network on the kernels, from layers that are packed already; None where these do not support it."""
    own, head, norms = network.embedding, network.packed_head, network.fc_norm
    if network.native_stack is None or network.softcap or network.correction is not None:
        return None
    assert head is not None
    markov_in, markov_out, confidence = network.markov_in, network.markov_out, network.confidence
    weights = BlockDraftWeights(
        embedding=network.get_buffer("_embedding") if own is None else own,
        embedding_scale=network.embedding_scale if own is None else 1.0,
        mask=network.mask_embedding,
        slots=network.config.block_size,
        depth=network.depth,
        window_causal=network.config.window_causal,
        window_from_anchor=network.config.window_from_anchor,
        fuse=_linear(network.fc),
        state_norms=None if norms is None else torch.stack([_scale(norm) for norm in norms]),
        feature_norm=_scale(network.hidden_norm),
        final_norm=_scale(network.norm),
        head=head,
        token_of=network.token_of,
        markov=None if markov_in is None or markov_out is None else (markov_in.weight, _linear(markov_out)),
        confidence=None if confidence is None else _linear(confidence),
    )
    return NativeBlockDrafts(network.native_stack, weights)


def _scale(norm: nn.Module) -> torch.Tensor:
    """The scale of a norm that is packed already."""
    assert isinstance(norm, PackedNorm)
    return norm.weight


def _replace_modules(module: nn.Module, form: _Format | None, stacked: nn.Module | None) -> None:
    """Replace norms and linear layers by their packed forms; the linear layers in `stacked` are packed already."""
    for name, child in list(module.named_children()):
        if isinstance(child, RMSNorm):
            setattr(module, name, PackedNorm(child))
        elif not isinstance(child, nn.Linear):
            _replace_modules(child, None if child is stacked else form, stacked)
        elif form is not None:
            setattr(module, name, PackedLinear(form.linear(child.weight, child.bias)))
