"""A trained network made fast for drafting on a CPU: its matrices in the form of the native kernels."""

import copy
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import nn

from foretell.model import kernels as native
from foretell.model.config import RopeConfig
from foretell.model.decoder import RMSNorm
from foretell.model.kernels.decoder import PlainBlock
from foretell.model.kernels.eagle import NativeEagle, Surroundings
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.rows import rms_norm
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.stages import NativeStage, NativeStages
from foretell.model.kernels.structures import Precision
from foretell.model.rope import tables
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.eagle import Eagle3, EagleNetwork
from foretell.speculator.network.layer import Eagle3FirstLayer, EagleLayer
from foretell.speculator.network.mlp_speculator import NORM_EPS, MLPSpeculator

S = TypeVar("S", bound=Speculator)


class PackedLinear(nn.Module):
    """A linear layer on the native kernels; float32 in and out, whatever it holds."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision) -> None:
        super().__init__()
        self.linear = NativeLinear(weight, bias, precision)

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        flat = x.reshape(-1, x.shape[-1]).float().contiguous()
        return self.linear(flat).view(*x.shape[:-1], self.linear.outputs)


class PackedNorm(nn.Module):
    """A root-mean-square norm on the native kernels, float32 in and out."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self._weight, self._eps = norm.weight.detach().float(), norm.eps

    def forward(self, x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
        """Normalise and scale the last axis."""
        return rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self._weight, self._eps).view(x.shape)


def pack_network(network: S, precision: Precision = "int8") -> S:
    """A copy of the network with every `nn.Linear` and its output matrix packed; itself where the kernels do not run or
    do not fit its dtype.

    What else it holds computes in float32 then and is shared with the network where that is float32 already. A packed
    network drafts; it can be neither trained nor saved. What a matrix makes of a state does not depend on how many
    states share the call.
    """
    head = network.lm_head
    unfit = head.device.type != "cpu" or head.dtype == torch.float64 or not native.available()
    if unfit or network.packed_head is not None:
        return network
    fast = _copy(network)
    stacked: nn.Module | None = None
    if isinstance(fast, EagleNetwork):
        fast.native_stack = _stack(fast, precision)
        stacked = fast.layers if fast.native_stack else None
    fast.packed_head = NativeLinear(head, None, precision)
    if isinstance(fast, Eagle3):
        fast.native = _eagle(fast, precision)
    _swap(fast, precision, stacked)
    for module in fast.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(parameter.detach().float(), requires_grad=False))
    if isinstance(fast, MLPSpeculator) and not fast.config.own_embedding:
        stages = [_stage(fast, i) for i in range(fast.stages)]
        table, scale = fast.get_buffer("_embedding"), fast.embedding_scale
        fast.native = NativeStages(stages, table, scale, fast.token_of)
    return fast


def _copy(network: S) -> S:
    """Modules of its own around the same tensors."""
    tensors = [
        *network.parameters(),
        *network.buffers(),
        *(v for v in vars(network).values() if isinstance(v, torch.Tensor)),
    ]
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def _stage(network: MLPSpeculator, i: int) -> NativeStage:
    """A stage in one call, on the layers that are packed already."""
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


def _plain(layer: EagleLayer) -> PlainBlock:
    """A layer's weights as the kernels' packer takes them."""
    attention, norm = layer.self_attn, layer.post_attention_layernorm.weight
    return PlainBlock(
        # Not looked at in a layer without one.
        attention_norm=norm if layer.input_layernorm is None else layer.input_layernorm.weight,
        qkv=attention.qkv_proj.weight,
        qkv_bias=attention.qkv_proj.bias,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        output=attention.o_proj.weight,
        mlp_norm=norm,
        gate_up=layer.mlp.gate_up_proj.weight,
        down=layer.mlp.down_proj.weight,
    )


def _stack(network: EagleNetwork, precision: Precision) -> NativeStack | None:
    """The network's layers on the kernels; None where these do not run them."""
    config = network.config.decoder_config
    if not NativeStack.supports(config):
        return None
    blocks = [_plain(layer) for layer in network.layers if isinstance(layer, EagleLayer)]
    return NativeStack(config, blocks, precision, tables(config.rope or RopeConfig(), config.head_dim, config.context))


def _eagle(network: Eagle3, precision: Precision) -> NativeEagle | None:
    """The layers with what surrounds them; None where the kernels have no place for it."""
    first, own, head, config = network.layers[0], network.embedding, network.packed_head, network.config
    if network.native_stack is None or config.norm_output or config.norm_before_fc or network.softcap:
        return None
    assert isinstance(first, Eagle3FirstLayer) and head is not None
    norms, fuse = network.fc_norm, PackedLinear(network.fc.weight, network.fc.bias, precision)
    around = Surroundings(
        embedding=network.get_buffer("_embedding") if own is None else own,
        scale=network.embedding_scale if own is None else 1.0,
        fuse=fuse.linear,
        state_norms=None if norms is None else torch.stack([norm.get_parameter("weight") for norm in norms]),
        embedding_norm=first.input_layernorm.weight,
        feature_norm=first.hidden_norm.weight,
        normed=first.norm_before_residual,
        leaving=network.norm.weight,
        head=head,
        token_of=network.token_of,
    )
    network.add_module("fc", fuse)
    return NativeEagle(network.native_stack, around)


def _swap(module: nn.Module, precision: Precision | None, stacked: nn.Module | None) -> None:
    """Swap norms, and linear layers too where there is a precision for them, as there is not within `stacked`."""
    for name, child in list(module.named_children()):
        if isinstance(child, RMSNorm):
            setattr(module, name, PackedNorm(child))
        elif not isinstance(child, nn.Linear):
            _swap(child, None if child is stacked else precision, stacked)
        elif precision is not None:
            setattr(module, name, PackedLinear(child.weight, child.bias, precision))
