"""Reads the layers with a recurrent state from the tensors of a checkpoint."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from foretell.model.block.linear import Linear
from foretell.model.block.state_layers import GatedDeltaNet, Mamba2, ShortConvolution, StateMixer
from foretell.model.config.model import ModelConfig
from foretell.model.config.states import DeltaNetConfig, Mamba2Config, ShortConvConfig

Tensor = torch.Tensor
Require = Callable[..., Tensor]
"""`(name, *shape)` to the tensor of a block with this name and shape."""
Place = Callable[[Tensor], Tensor]
"""A tensor in the dtype and on the device of the model."""


class StateParts(NamedTuple):
    """What takes the place of a block's attention."""

    input: Linear
    mixer: StateMixer
    output: Linear


def build_state_parts(config: ModelConfig, require: Require, place: Place, mamba: str = "mamba") -> StateParts:
    """The parts of a block with a recurrent state; `mamba`: what Mamba-2 is called.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    if isinstance(config.state, DeltaNetConfig):
        return _delta_net(config, config.state, require, place)
    if isinstance(config.state, Mamba2Config):
        return _mamba2(config, config.state, lambda name, *shape: require(f"{mamba}.{name}", *shape), place)
    assert isinstance(config.state, ShortConvConfig)
    return _short_convolution(config.state, require, place)


def _delta_net(config: ModelConfig, c: DeltaNetConfig, require: Require, place: Place) -> StateParts:
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    if config.architecture == "qwen3_next":
        rows, gates = _grouped_projections(config, c, require)
    else:
        sizes = {"qkv": 2 * keys + values, "z": values}
        rows = torch.cat([require(f"linear_attn.in_proj_{n}.weight", o, config.hidden) for n, o in sizes.items()])
        gates = torch.cat([require(f"linear_attn.in_proj_{n}.weight", c.value_heads, config.hidden) for n in "ba"])
    device = place(gates).device
    vectors = {"A_log": c.value_heads, "dt_bias": c.value_heads, "norm.weight": c.value_dim}
    decay, time, norm = (require(f"linear_attn.{n}", size).to(device, torch.float32) for n, size in vectors.items())
    convolution = require("linear_attn.conv1d.weight", c.shape.channels, 1, c.taps)[:, 0].to(device, torch.float32)
    mixer = GatedDeltaNet(c, convolution, Linear(place(gates)), decay, time, norm, config.norm_eps)
    output = require("linear_attn.out_proj.weight", config.hidden, values)
    return StateParts(Linear(place(rows)), mixer, Linear(place(output)))


def _grouped_projections(config: ModelConfig, c: DeltaNetConfig, require: Require) -> tuple[Tensor, Tensor]:
    """Qwen3-Next's projections, stored as [q, k, v, z] and [b, a] per key head, in the order of the parts."""
    shared = c.value_heads // c.key_heads
    parts = [c.key_dim, c.key_dim, shared * c.value_dim, shared * c.value_dim]
    found = require("linear_attn.in_proj_qkvz.weight", c.key_heads * sum(parts), config.hidden)
    rows = torch.split(found.view(c.key_heads, -1, config.hidden), parts, 1)
    gates = require("linear_attn.in_proj_ba.weight", 2 * c.value_heads, config.hidden)
    halves = gates.view(c.key_heads, 2, shared, config.hidden).transpose(0, 1)
    return torch.cat([part.flatten(0, 1) for part in rows]), halves.flatten(0, 2)


def _short_convolution(c: ShortConvConfig, require: Require, place: Place) -> StateParts:
    def linear(name: str, outputs: int) -> Linear:
        bias = place(require(f"conv.{name}.bias", outputs)) if c.bias else None
        return Linear(place(require(f"conv.{name}.weight", outputs, c.channels)), bias)

    source, output = linear("in_proj", 3 * c.channels), linear("out_proj", c.channels)
    device = source.weight.device
    convolution = require("conv.conv.weight", c.channels, 1, c.taps)[:, 0].to(device, torch.float32)
    bias = require("conv.conv.bias", c.channels).to(device, torch.float32) if c.bias else None
    return StateParts(source, ShortConvolution(c, convolution, bias), output)


def _mamba2(config: ModelConfig, c: Mamba2Config, require: Require, place: Place) -> StateParts:
    inner, channels = c.heads * c.head_dim, c.shape.channels
    sizes = [inner, channels, c.heads]

    def projection(kind: str, *width: int) -> tuple[Tensor, Tensor]:
        """Rows of the convolution and the gates, and those of the time steps."""
        z, mixed, time = torch.split(require(f"in_proj.{kind}", sum(sizes), *width), sizes)
        return place(torch.cat((mixed, z))), place(time)

    (rows, time), biases = projection("weight", config.hidden), projection("bias") if c.bias else (None, None)
    device = rows.device

    def vector(name: str, *shape: int) -> Tensor:
        return require(f"{name}", *shape).to(device, torch.float32)

    mixer = Mamba2(
        c,
        vector("conv1d.weight", channels, 1, c.taps)[:, 0],
        vector("conv1d.bias", channels) if c.conv_bias else None,
        Linear(time, biases[1]),
        vector("A_log", c.heads),
        vector("dt_bias", c.heads),
        vector("D", c.heads),
        vector("norm.weight", inner),
        config.norm_eps,
    )
    output = require("out_proj.weight", config.hidden, inner)
    output_bias = place(require("out_proj.bias", config.hidden)) if c.bias else None
    return StateParts(Linear(rows, biases[0]), mixer, Linear(place(output), output_bias))
