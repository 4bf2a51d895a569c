"""The modules of a decoder block from the record of its weights, and the record of a block's modules."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from foretell.model.block.latent import LATENT_EPS, LatentBlock, LatentProjection
from foretell.model.block.layer import DecoderBlock, FeedForward, RMSNorm
from foretell.model.block.layer_inputs import LayerInput
from foretell.model.block.linear import AnyLinear, FactoredLinear, Linear
from foretell.model.block.moe import DenseAndExperts, ExpertFeedForward
from foretell.model.block.spec import (
    VECTORS,
    BlockWeights,
    ExpertWeights,
    GatedWeights,
    LatentWeights,
    LayerInputWeights,
    LinearWeights,
    StateWeights,
)
from foretell.model.block.state_layers import GatedDeltaNet, Mamba2, ShortConvolution, StateMixer
from foretell.model.config.model import ModelConfig
from foretell.model.config.states import DeltaNetConfig, Mamba2Config, ShortConvConfig
from foretell.model.matrices.stored import widened

Tensor = torch.Tensor
T = TypeVar("T")
R = TypeVar("R")


def from_weights(
    config: ModelConfig, i: int, weights: BlockWeights, dtype: torch.dtype, device: torch.device
) -> DecoderBlock:
    """Block `i` of a decoder; its matrices and their biases in `dtype`, other tensors in float32."""
    return _Modules(config, dtype, device).block(i, weights)


def _map(change: Callable[[T], R], value: T | None) -> R | None:
    return None if value is None else change(value)


def _nothing(inputs: int) -> Linear:
    """A matrix without outputs: of a sub-layer that a block does not have."""
    return Linear(torch.empty(0, inputs))


class _Modules:
    """Makes modules."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device

    def block(self, i: int, w: BlockWeights) -> DecoderBlock:
        """A block of a record."""
        vectors = {name: getattr(w, name) for name in VECTORS}
        return (DecoderBlock if w.latent is None else LatentBlock)(
            qkv=self._projection(w),
            output=_nothing(0) if w.output is None else self._linear(w.output),
            mlp=self._feed_forward(w),
            mixer=_map(self._mixer, w.mixer),
            attention_gate=w.attention_gate is not None,
            qk_norm_over=self._config.qk_norm_over,
            parallel=self._config.parallel_blocks,
            centered=self._config.centered,
            residual_scale=self._config.residual_scale,
            reads_keys=self._config.kv_layer_of(i) != i,
            layer_input=_map(self._layer_input, w.layer_input),
            scale=_map(self._vector, w.scale),
            attention_shortcut=_map(self._dense, w.attention_shortcut),
            mlp_shortcut=_map(self._dense, w.mlp_shortcut),
            **{name: self._holder(name, vector) for name, vector in vectors.items()},
        )

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, torch.float32)

    def _unrounded(self, tensor: Tensor) -> Tensor:
        """A tensor of a router or of its gate, which is at least in float32."""
        return tensor.to(self._device, torch.promote_types(self._dtype, torch.float32))

    def _holder(self, name: str, vector: Tensor | None) -> Any:
        """The norm or the vector of this name."""
        return _map(self._norm if name.endswith("_norm") else self._vector, vector)

    def _norm(self, weight: Tensor) -> RMSNorm:
        return RMSNorm(weight.to(self._device), self._config.norm_eps)

    def _dense(self, *linears: LinearWeights) -> Linear:
        """Linear layers one below the other."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        matrix = torch.cat([widened(part) for linear in linears for part in linear.parts])
        return Linear(self._place(matrix), self._place(torch.cat(biases)) if biases else None)

    def _linear(self, *linears: LinearWeights) -> AnyLinear:
        factor = linears[0].factor
        if factor is None:
            return self._dense(*linears)
        return FactoredLinear(self._dense(LinearWeights((factor,))), self._dense(*linears))

    def _precise(self, linear: LinearWeights) -> Linear:
        """A linear layer that is at least in float32."""
        return Linear(self._unrounded(widened(linear.parts[0])), _map(self._unrounded, linear.bias))

    def _projection(self, w: BlockWeights) -> nn.Module:
        if w.qkv is None:
            return _nothing(self._config.hidden)
        if w.latent is not None:
            return self._latent(w.qkv, w.latent)
        return self._linear(*(part for part in (w.qkv, w.attention_gate) if part is not None))

    def _latent(self, inputs: LinearWeights, w: LatentWeights) -> LatentProjection:
        sizes = self._config.latent
        assert sizes is not None
        first, compress = (self._dense(LinearWeights((part,))) for part in inputs.parts)
        query: nn.Module = first
        if w.query is not None and w.query_norm is not None:
            norm = RMSNorm(w.query_norm.to(self._device), LATENT_EPS)
            query = nn.Sequential(first, norm, self._dense(w.query))
        key, value = (
            self._place(widened(linear.parts[0])).view(self._config.heads, -1, sizes.kv_rank)
            for linear in (w.key, w.value)
        )
        return LatentProjection(sizes, query, compress, RMSNorm(w.key_norm.to(self._device), LATENT_EPS), key, value)

    def _feed_forward(self, w: BlockWeights) -> FeedForward | ExpertFeedForward | DenseAndExperts:
        activation, hidden = self._config.activation, self._config.hidden
        if w.mlp is None and w.experts is None:
            return FeedForward(_nothing(hidden), _nothing(0), activation)
        dense = _map(lambda mlp: FeedForward(self._linear(mlp.gate_up), self._linear(mlp.down), activation), w.mlp)
        if w.experts is None:
            assert dense is not None
            return dense
        experts = self._experts(w.experts)
        if dense is None:
            return experts
        e = w.experts
        assert e.router_norm is not None and e.dense_norm is not None
        assert e.input_norm is not None and e.output_norm is not None
        return DenseAndExperts(
            dense=dense,
            dense_norm=self._norm(e.dense_norm),
            experts=experts,
            experts_input_norm=self._norm(e.input_norm),
            experts_norm=self._norm(e.output_norm),
            router_norm=self._norm(e.router_norm),
        )

    def _experts(self, w: ExpertWeights) -> ExpertFeedForward:
        config = self._config.experts
        assert config is not None
        each = [(self._dense(one.gate_up), self._dense(one.down)) for one in w.experts]
        shared = None
        if w.shared is not None:
            shared = self._dense(w.shared.gate_up), self._dense(w.shared.down), _map(self._precise, w.shared_gate)
        return ExpertFeedForward(
            config,
            router=self._precise(w.router),
            gate_up=[gate_up for gate_up, _ in each],
            down=[down for _, down in each],
            shared=shared,
            selection_bias=_map(self._unrounded, w.selection_bias),
            activation=self._config.activation,
            expert_scale=_map(self._unrounded, w.expert_scale),
        )

    def _mixer(self, w: StateWeights) -> StateMixer:
        state, eps = self._config.state, self._config.norm_eps
        convolution, bias = self._vector(w.convolution)[:, 0], _map(self._vector, w.convolution_bias)
        if isinstance(state, ShortConvConfig):
            return ShortConvolution(state, convolution, bias)
        assert w.gates is not None and w.log_decay is not None and w.time_bias is not None and w.norm is not None
        gates, decay, time, norm = self._dense(w.gates), *map(self._vector, (w.log_decay, w.time_bias, w.norm))
        if isinstance(state, DeltaNetConfig):
            return GatedDeltaNet(state, convolution, gates, decay, time, norm, eps)
        assert isinstance(state, Mamba2Config) and w.skip is not None
        return Mamba2(state, convolution, bias, gates, decay, time, self._vector(w.skip), norm, eps)

    def _layer_input(self, w: LayerInputWeights) -> LayerInput:
        gate, projection = self._dense(w.gate), self._dense(w.projection)
        return LayerInput(gate, projection, self._norm(w.norm), self._config.activation)


def to_weights(layer: nn.Module) -> BlockWeights:
    """The record of a block's modules, whose tensors it shares."""
    assert isinstance(layer, DecoderBlock)
    qkv, gate, latent = layer.qkv, None, None
    vectors = {name: _of_vector(getattr(layer, name)) for name in VECTORS}
    mixes = _of_linear(layer.output).outputs > 0
    if isinstance(qkv, LatentProjection):
        inputs, latent = _of_latent(qkv)
    else:
        inputs = _of_linear(qkv)
    if layer.attention_gate:
        inputs, gate = _split(inputs, layer.output.weight.shape[1])
    return BlockWeights(
        qkv=inputs if mixes else None,
        output=_of_linear(layer.output) if mixes else None,
        attention_gate=gate,
        mlp=_of_network(layer.mlp.dense if isinstance(layer.mlp, DenseAndExperts) else layer.mlp),
        attention_shortcut=_map(_of_linear, layer.attention_shortcut),
        mlp_shortcut=_map(_of_linear, layer.mlp_shortcut),
        scale=layer.scale,
        experts=_of_experts(layer.mlp),
        latent=latent,
        mixer=_map(_of_mixer, layer.mixer),
        layer_input=_map(_of_layer_input, layer.layer_input),
        **vectors,
    )


def _of_vector(holder: nn.Module | Tensor | None) -> Any:
    if isinstance(holder, nn.Identity):
        return None  # the block has no such norm
    return holder.weight if isinstance(holder, RMSNorm) else holder


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight


def _of_linear(linear: nn.Module) -> LinearWeights:
    factor = None
    if isinstance(linear, FactoredLinear):
        factor, linear = linear.inner.weight.detach(), linear.outer
    assert isinstance(linear, Linear)
    return LinearWeights((linear.weight.detach(),), _map(Tensor.detach, linear.bias), factor)


def _split(linear: LinearWeights, last: int) -> tuple[LinearWeights, LinearWeights]:
    """A linear layer as two, of which the second has `last` outputs."""
    (matrix,), sizes = linear.parts, [linear.outputs - last, last]
    assert isinstance(matrix, Tensor)
    biases = (None, None) if linear.bias is None else torch.split(linear.bias, sizes)
    first, second = (LinearWeights((p,), b) for p, b in zip(torch.split(matrix, sizes), biases, strict=True))
    return first, second


def _of_latent(projection: LatentProjection) -> tuple[LinearWeights, LatentWeights]:
    """The matrices that read a block's normed input, and the other weights of latent attention."""
    first, between, last = projection.query, None, None
    if isinstance(projection.query, nn.Sequential):
        first, between, last = projection.query
    inputs = LinearWeights((*_of_linear(first).parts, *_of_linear(projection.compress).parts))
    key, value = (LinearWeights((each.detach().flatten(0, 1),)) for each in (projection.key, projection.value))
    return inputs, LatentWeights(
        query=_map(_of_linear, last),
        query_norm=_of_vector(between),
        key_norm=projection.norm.weight,
        key=key,
        value=value,
    )


def of_gated(gate_up: nn.Module, down: nn.Module) -> GatedWeights:
    """The record of a feed-forward network's modules."""
    both, last = _of_linear(gate_up), _of_linear(down)
    (matrix,) = both.parts
    assert isinstance(matrix, Tensor)
    if len(matrix) != last.parts[0].shape[1] or last.factor is not None:
        both = LinearWeights(tuple(matrix.chunk(2)), both.bias, both.factor)
    return GatedWeights(both, last)


def _of_network(network: nn.Module) -> GatedWeights | None:
    if not isinstance(network, FeedForward) or _of_linear(network.gate_up).outputs == 0:
        return None
    return of_gated(network.gate_up, network.down)


def _of_experts(mlp: nn.Module) -> ExpertWeights | None:
    beside, norms = mlp if isinstance(mlp, DenseAndExperts) else None, dict[str, Tensor]()
    experts = mlp if beside is None else beside.experts
    if not isinstance(experts, ExpertFeedForward):
        return None
    if beside is not None:
        norms = {
            "router_norm": _weight(beside.router_norm),
            "input_norm": _weight(beside.experts_input_norm),
            "output_norm": _weight(beside.experts_norm),
            "dense_norm": _weight(beside.dense_norm),
        }
    shared = None
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        shared = of_gated(experts.shared_gate_up, experts.shared_down)
    return ExpertWeights(
        router=_of_linear(experts.router),
        experts=map(of_gated, experts.gate_up, experts.down),
        selection_bias=experts.selection_bias,
        shared=shared,
        shared_gate=_map(_of_linear, experts.shared_gate),
        expert_scale=experts.expert_scale,
        **norms,
    )


def _of_mixer(mixer: StateMixer) -> StateWeights:
    convolution = mixer.get_parameter("convolution")[:, None]
    if isinstance(mixer, ShortConvolution):
        return StateWeights(convolution=convolution, convolution_bias=mixer.bias)
    assert isinstance(mixer, GatedDeltaNet | Mamba2)
    return StateWeights(
        gates=_of_linear(mixer.gates),
        convolution=convolution,
        convolution_bias=mixer.convolution_bias if isinstance(mixer, Mamba2) else None,
        log_decay=mixer.log_decay,
        time_bias=mixer.time_bias,
        skip=mixer.skip if isinstance(mixer, Mamba2) else None,
        norm=mixer.norm,
    )


def _of_layer_input(part: LayerInput) -> LayerInputWeights:
    return LayerInputWeights(_of_linear(part.gate), _of_linear(part.projection), _weight(part.norm))
