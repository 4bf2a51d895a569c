"""The weights of a decoder block, and how the kernels pack them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from foretell.model.block.expert_matrices import ExpertMatrices
from foretell.model.block.linear import Linear
from foretell.model.block.state_layers import StateMixer
from foretell.model.config.compressed import LowRank
from foretell.model.kernels import structures
from foretell.model.kernels.pack import Panels, plan_inner, plan_rows
from foretell.model.kernels.packed_file import PackedPart
from foretell.model.kernels.structures import Precision
from foretell.model.matrices.stored import Matrix

FACTORED = tuple(role.name for role in fields(LowRank))
"""Linear layers of a block that may be of low rank; the last two are empty in a layer with experts."""


class LayerInputWeights(NamedTuple):
    """Weights of a block's per-layer input; see `foretell.model.block.layer_inputs.LayerInput`."""

    gate: Matrix
    projection: Matrix
    norm: Tensor


@dataclass(frozen=True)
class LatentWeights:
    """What latent attention has between its projections and its output; see `model.latent.LatentProjection`."""

    query: Matrix | None
    """From the queries' latent vector to the queries; None: they have none."""
    query_norm: Tensor | None
    key_norm: Tensor
    key: Float[Tensor, "h n r"]
    value: Float[Tensor, "h v r"]
    eps: float


@dataclass(frozen=True)
class BlockWeights:
    """Weights of one decoder block; matrices are [out, in]. None: the architecture has none."""

    attention_norm: Tensor
    qkv: Sequence[Matrix]
    """One matrix, or query, key and value apart."""
    output: Matrix | None
    """None: the block is a feed-forward network alone."""
    mlp_norm: Tensor
    gate: Matrix | None
    up: Matrix | None
    down: Matrix | None
    """None: the layer has experts, or no feed-forward network."""
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_bias: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    sinks: Tensor | None = None
    """A score per query head that joins the softmax over its keys."""
    experts: ExpertMatrices | None = None
    attention_gate: Matrix | None = None
    attention_gate_bias: Tensor | None = None
    mixer: StateMixer | None = None
    """What takes the place of attention; `qkv` and `output` are its projections."""
    latent: LatentWeights | None = None
    """`qkv` is then the queries, or their latent vector, and what keys and values are made of."""
    v_norm: Tensor | None = None
    reads_keys: bool = False
    """Keys and values are those of an earlier layer: `qkv` gives queries only."""
    layer_input: LayerInputWeights | None = None
    scale: float = 1.0
    """Multiplies the residual stream after the block."""
    factors: Mapping[str, Matrix] = field(default_factory=dict)
    """Of matrices of low rank the factors that read their inputs, by `FACTORED`."""
    shortcuts: Sequence[Matrix] = ()
    """What multiplies the residual stream before the output of attention and of the feed-forward network is added."""


def plan_block(block: BlockWeights, precision: Precision) -> Sequence[list[Panels]]:
    """How to pack the linear layers of a block: of query, key and value, of the attention's output, and of a dense
    feed-forward network gate and up, and its output; then the gate of attention, gate and projection of the block's
    own input, the factors of matrices of low rank, and the shortcuts.
    """
    layers = [] if block.output is None else [_plan_inputs(block, precision), plan_rows([block.output], precision)]
    if block.up is not None and block.down is not None:
        layers += [plan_inner(block.gate, block.up, precision), plan_rows([block.down], precision)]
    further = [] if block.attention_gate is None else [block.attention_gate]
    further += [] if block.layer_input is None else block.layer_input[:2]
    further += block.factors.values()
    return [
        *layers,
        *(plan_rows([matrix], precision) for matrix in further),
        *(plan_rows([matrix], float_precision(precision)) for matrix in block.shortcuts),
    ]


def float_precision(precision: Precision) -> Precision:
    """The precision of matrices that are floats in all precisions."""
    return "float32" if precision == "float32" else "bfloat16"


def _plan_inputs(block: BlockWeights, precision: Precision) -> list[Panels]:
    inputs, gates = plan_rows(block.qkv, precision), _mixer_gates(block)
    if gates is None:
        return inputs
    return [*inputs, *plan_rows([gates.weight], float_precision(precision))]


def _mixer_gates(block: BlockWeights) -> Linear | None:
    """The gates that a layer's mixer reads beside its projected input."""
    gates = getattr(block.mixer, "gates", None)
    return gates if isinstance(gates, Linear) else None


def input_bias(block: BlockWeights) -> Tensor | None:
    """The bias of all products of a block's normed input."""
    gates = _mixer_gates(block)
    if gates is None or (block.qkv_bias is None and gates.bias is None):
        return block.qkv_bias
    outputs = sum(part.shape[0] for part in block.qkv)
    sides = zip((block.qkv_bias, gates.bias), (outputs, gates.weight.shape[0]), strict=True)
    return torch.cat([torch.zeros(n) if bias is None else bias.detach().float() for bias, n in sides])


class PackedBlock(PackedPart):
    """A packed decoder block: its structure first, and all memory that this points into."""

    @property
    def struct(self) -> structures.Layer:
        """The argument of the kernels."""
        found = self.structs[0]
        assert isinstance(found, structures.Layer)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)
