"""Packs the weights of decoder blocks for the kernels; see `foretell.model.block.spec` for what a block consists of."""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretell.model.block.latent import LATENT_EPS
from foretell.model.block.spec import VECTORS, BlockWeights, LatentWeights, LinearWeights
from foretell.model.config.model import MLAConfig, ModelConfig
from foretell.model.kernels import structures
from foretell.model.kernels.experts import pack_experts
from foretell.model.kernels.linear import (
    LinearPlan,
    PartMemory,
    float_precision,
    linear_outputs,
    plan_gate_up,
    plan_linear,
    set_factor,
)
from foretell.model.kernels.pack import plan_inner, plan_rows
from foretell.model.kernels.packed_file import PackedPart
from foretell.model.kernels.states import pack_mixer
from foretell.model.kernels.structures import OPERANDS, PANEL, Precision
from foretell.model.matrices.stored import widened

_FACTOR = ".factor"


def plan_block(block: BlockWeights, precision: Precision) -> Mapping[str, LinearPlan]:
    """How to pack the linear layers of a block, by their names in `Layer`; a factor of low rank has the name of its
    layer and `.factor`.
    """
    own, mlp, floats = block.layer_input, block.mlp, float_precision(precision)
    linears = {
        "qkv": block.qkv,
        "output": block.output,
        "gate_up": None if mlp is None else mlp.gate_up,
        "down": None if mlp is None else mlp.down,
        "attention_gate": block.attention_gate,
        "input_gate": None if own is None else own.gate,
        "input_projection": None if own is None else own.projection,
    }
    plans = {name: plan_linear(linear, precision) for name, linear in linears.items() if linear is not None}
    if mlp is not None:
        plans["gate_up"] = plan_gate_up(mlp, precision)
    if block.qkv is not None and block.mixer is not None and block.mixer.gates is not None:
        plans["qkv"] = _with_gates(block.qkv, block.mixer.gates, precision)
    for name, linear in linears.items():
        if linear is not None and linear.factor is not None:
            plans[f"{name}{_FACTOR}"] = LinearPlan(plan_rows([linear.factor], precision))
    shortcuts = {"attention_shortcut": block.attention_shortcut, "mlp_shortcut": block.mlp_shortcut}
    return plans | {name: plan_linear(each, floats) for name, each in shortcuts.items() if each is not None}


def _with_gates(qkv: LinearWeights, gates: LinearWeights, precision: Precision) -> LinearPlan:
    """All products of a normed input that what takes the place of attention reads."""
    first, second = plan_linear(qkv, precision), plan_linear(gates, float_precision(precision))
    bias = None
    if qkv.bias is not None or gates.bias is not None:
        bias = torch.cat([_bias(qkv), _bias(gates)])
    return LinearPlan([*first.weights, *second.weights], bias)


def _bias(linear: LinearWeights) -> Tensor:
    return torch.zeros(linear.outputs) if linear.bias is None else linear.bias.detach().float()


class PackedBlock(PackedPart):
    """A packed decoder block: its structure first, and all memory that this points into."""

    @property
    def struct(self) -> structures.Layer:
        """The argument of the kernels."""
        first = self.structs[0]
        assert isinstance(first, structures.Layer)
        return first

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


def pack_block(
    config: ModelConfig, i: int, block: BlockWeights, precision: Precision, kernels: ctypes.CDLL
) -> PackedBlock:
    """Block `i` of a model, without its rotary tables and its place in the cache."""
    memory = PartMemory(kernels)
    own, inputs = block.layer_input, config.layer_inputs
    scale = 0.0 if block.scale is None else float(block.scale)
    struct = structures.make(
        structures.Layer,
        **_pack_linears(plan_block(block, precision), memory),
        **{name: memory.vector(getattr(block, name)) for name in VECTORS},
        window=config.window_of(i),
        attention=i not in config.attention_free_layers,
        mlp=i not in config.mlp_free_layers,
        chunked=config.chunked,
        reads_keys=config.kv_layer_of(i) != i,
        input_norm=None if own is None else memory.vector(own.norm),
        input_first=0 if inputs is None else i * inputs.width,
        scale=0.0 if scale == 1 else scale,
    )
    if block.experts is not None:
        assert config.experts is not None
        struct.experts = pack_experts(config.experts, block.experts, precision, memory)
    if block.mixer is not None:
        assert config.state is not None
        index = config.state_layers.index(i)
        struct.state = pack_mixer(config.state, block.mixer, index, config.norm_eps, memory)
    if block.latent is not None:
        assert config.latent is not None
        struct.latent = _pack_latent(config.latent, config.heads, block.latent, precision, memory)
    return PackedBlock((struct, *memory.structs), memory.tensors)


def pack_update(layer: structures.Layer, path: str, update: LinearWeights, memory: PartMemory) -> None:
    """Let a linear layer of a packed block, by its path in `BlockWeights`, add an update of low rank to its outputs.

    The update is in float32; its factor is rounded as the inputs of the layer are.
    """
    base: structures.Weight = getattr(layer, path.rpartition(".")[2])
    operand = OPERANDS[base.operand]
    assert update.factor is not None
    parts, outputs = [widened(part) for part in update.parts], linear_outputs(base)
    plan = plan_inner(parts[0], parts[1], "float32") if path == "mlp.gate_up" and len(parts) > 1 else None
    if plan is None:
        whole = torch.cat(parts)
        plan = plan_rows([pad(whole, (0, 0, 0, outputs - len(whole)))], "float32")
    factor = plan_rows([update.factor], operand if operand in ("float32", "bfloat16") else "float32")
    packed, inner = memory.linears([LinearPlan(plan), LinearPlan(factor)])
    packed.outputs = -(-packed.outputs // PANEL) * PANEL
    packed.factor = memory.keep(inner)
    base.update = memory.keep(packed)


def _pack_linears(plans: Mapping[str, LinearPlan], memory: PartMemory) -> dict[str, structures.Weight]:
    """The structures of linear layers by name, factors of low rank within those of their layers."""
    packed = dict(zip(plans, memory.linears(list(plans.values())), strict=True))
    for name in [name for name in packed if name.endswith(_FACTOR)]:
        set_factor(packed[name.removesuffix(_FACTOR)], memory.keep(packed.pop(name)))
    return packed


def _pack_latent(sizes: MLAConfig, heads: int, weights: LatentWeights, precision: Precision, memory: PartMemory) -> int:
    """The address of latent attention; the matrices of the heads are floats."""
    floats = float_precision(precision)
    key, value = (widened(each.parts[0]).view(heads, -1, sizes.kv_rank) for each in (weights.key, weights.value))
    plans = [LinearPlan(plan_rows([head], floats)) for head in (*key.transpose(1, 2), *value)]
    if weights.query is not None:
        plans.append(plan_linear(weights.query, precision))
    packed = memory.linears(plans)
    array = structures.Weight * heads
    struct = structures.make(
        structures.Latent,
        query=packed[-1] if weights.query is not None else structures.Weight(),
        query_norm=memory.vector(weights.query_norm),
        key_norm=memory.vector(weights.key_norm),
        key=memory.keep(array(*packed[:heads])),
        value=memory.keep(array(*packed[heads : 2 * heads])),
        query_rank=sizes.q_rank,
        kv_rank=sizes.kv_rank,
        nope_dim=sizes.nope_dim,
        rope_dim=sizes.rope_dim,
        value_dim=sizes.value_dim,
        eps=LATENT_EPS,
    )
    return memory.keep(struct)
