# ruff: noqa: RUF009 (the calls return `dataclasses.field`)
"""What a decoder block consists of: the one list of its tensors.

`BlockWeights` and its parts are the record of a block. Every field says where its tensor is in a checkpoint of Llama's
naming, which shape it has for a layer of a configuration, whether the layer has it, and whether it is a matrix that may
be quantised. Reading, packing, rounding and writing walk these fields. A new tensor is a line here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

import torch
from jaxtyping import Float

from foretell.model.config.families.base import Rows
from foretell.model.config.model import MLAConfig, ModelConfig, MoEConfig
from foretell.model.config.states import DeltaNetConfig, Mamba2Config, ShortConvConfig, StateConfig
from foretell.model.matrices.stored import Matrix

Tensor = torch.Tensor


@dataclass(frozen=True)
class Place:
    """A layer of a configuration, and within it the feed-forward network that is looked at."""

    config: ModelConfig
    layer: int
    network: str = "mlp"
    """What the names of the network's matrices begin with."""
    ffn: int = 0
    biased: bool = False
    """Whether they have biases."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.config.sizes_of(self.layer).head_dim

    @property
    def reads_keys(self) -> bool:
        """Whether keys and values are those of an earlier layer."""
        return self.config.kv_layer_of(self.layer) != self.layer

    @property
    def state(self) -> StateConfig | None:
        """What the layer has in place of attention."""
        return self.config.state if self.layer in self.config.state_layers else None

    @property
    def mixes(self) -> bool:
        """Whether the layer has attention, or what takes its place."""
        return self.layer not in self.config.attention_free_layers

    @property
    def attends(self) -> bool:
        """Whether the layer has attention that is not latent."""
        return self.mixes and self.state is None and self.config.latent is None

    @property
    def latent(self) -> MLAConfig | None:
        """The sizes of latent attention."""
        return self.config.latent if self.mixes and self.state is None else None

    @property
    def experts(self) -> MoEConfig | None:
        """The mixture of experts."""
        c = self.config
        has = c.experts is not None and self.layer in c.experts.layers and self.layer not in c.mlp_free_layers
        return c.experts if has else None

    @property
    def is_dense(self) -> bool:
        """Whether the layer has a network that all tokens read."""
        alone = self.experts is None or self.experts.beside_dense
        return self.layer not in self.config.mlp_free_layers and alone


@dataclass(frozen=True)
class VectorSpec:
    """A tensor that is no matrix: a norm, a bias, a vector of numbers per head."""

    name: Callable[[Place], str | None]
    """In the block; None: it is in no checkpoint, and all ones."""
    shape: Callable[[Place], tuple[int, ...]]
    when: Callable[[Place], bool]
    offset: bool = False
    """Whether `norm_offset` is added to what the checkpoint stores."""
    by_width: bool = False
    """Whether it is divided by the square root of the width of the residual stream."""


Narrowest = Literal["blocks", "float", "float32"]
"""What the matrices of a linear layer may be rounded to at most: quantised blocks; floats of 16 bits, because they give
the decay of recurrent states, multiply the residual stream or expand latent vectors; or float32, because they select
and weight experts.
"""


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer: matrices of the same inputs, one below the other, and their bias."""

    rows: Callable[[Place], list[Rows]]
    inputs: Callable[[Place], int]
    when: Callable[[Place], bool]
    bias: Callable[[Place], bool]
    narrowest: Narrowest
    factor: str = ""
    """Name of the factor of low rank that reads the inputs; empty: the matrices are never of low rank."""


@dataclass(frozen=True)
class PartSpec:
    """A part of a block with fields of its own."""

    kind: type[Any]
    when: Callable[[Place], bool]
    at: Callable[[Place], Place] = lambda at: at
    """Where the part is."""
    each: bool = False
    """There is one for every expert; `{}` in names is the number."""


Spec = VectorSpec | LinearSpec | PartSpec


def specs_of(kind: type[Any]) -> Mapping[str, Spec]:
    """The fields of a part, and what they hold."""
    return {each.name: each.metadata["spec"] for each in _fields(kind)}


def _fields(kind: type[Any]) -> tuple[Field[Any], ...]:
    return fields(kind)


def _always(at: Place) -> bool:
    return True


def _never(at: Place) -> bool:
    return False


def _hidden(at: Place) -> int:
    return at.hidden


def _field(spec: Spec) -> Any:
    """A field that holds this; it has to be given where every layer has it."""
    metadata = {"spec": spec}
    return field(metadata=metadata) if spec.when is _always else field(default=None, metadata=metadata)


def _vector(
    name: str | Callable[[Place], str | None],
    shape: Callable[[Place], tuple[int, ...]],
    when: Callable[[Place], bool] = _always,
    offset: bool = False,
    by_width: bool = False,
) -> Any:
    name_of = (lambda at: name) if isinstance(name, str) else name
    return _field(VectorSpec(name_of, shape, when, offset, by_width))


def _norm(name: str | Callable[[Place], str | None], when: Callable[[Place], bool] = _always) -> Any:
    return _vector(name, lambda at: (at.hidden,), when, offset=True)


def _linear(
    rows: Callable[[Place], list[Rows]],
    inputs: Callable[[Place], int] = _hidden,
    when: Callable[[Place], bool] = _always,
    bias: Callable[[Place], bool] = _never,
    narrowest: Narrowest = "blocks",
    factor: str = "",
) -> Any:
    return _field(LinearSpec(rows, inputs, when, bias, narrowest, factor))


def _part(
    kind: type[Any],
    when: Callable[[Place], bool],
    at: Callable[[Place], Place] = lambda at: at,
    each: bool = False,
) -> Any:
    return _field(PartSpec(kind, when, at, each))


@dataclass(frozen=True)
class LinearWeights:
    """A linear layer; matrices are [outputs, inputs]."""

    parts: tuple[Matrix, ...]
    """One below the other."""
    bias: Float[Tensor, " o"] | None = None
    """Of all outputs."""
    factor: Matrix | None = None
    """The layer is of low rank: this reads its inputs, and `parts` what it gives."""

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return sum(part.shape[0] for part in self.parts)


@dataclass(frozen=True)
class GatedWeights:
    """A feed-forward network; `gate_up` is gate, if there is one, and up."""

    gate_up: LinearWeights = _linear(
        lambda at: [
            Rows(f"{at.network}.{name}", at.ffn)
            for name in (("gate_proj", "up_proj") if at.config.gated else ("up_proj",))
        ],
        bias=lambda at: at.biased,
        factor="mlp.gate_up_v_proj",
    )
    down: LinearWeights = _linear(
        lambda at: [Rows(f"{at.network}.down_proj", at.hidden)],
        inputs=lambda at: at.ffn,
        bias=lambda at: at.biased,
        factor="mlp.down_v_proj",
    )

    @property
    def gate(self) -> Matrix | None:
        """None: there is none."""
        return self.gate_up.parts[0] if len(self.gate_up.parts) > 1 else None

    @property
    def up(self) -> Matrix:
        """The matrix whose outputs the gate multiplies."""
        return self.gate_up.parts[-1]


def _moe(at: Place) -> MoEConfig:
    assert at.config.experts is not None
    return at.config.experts


def _per_expert(at: Place) -> tuple[int, ...]:
    return (_moe(at).count,)


def _beside_dense(at: Place) -> bool:
    return _moe(at).beside_dense


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """A mixture of experts; the norms are those of experts beside a dense network."""

    router: LinearWeights = _linear(
        lambda at: [Rows("mlp.gate", _moe(at).count)], bias=lambda at: _moe(at).router_bias, narrowest="float32"
    )
    experts: Iterable[GatedWeights] = _part(
        GatedWeights,
        _always,
        lambda at: Place(at.config, at.layer, "mlp.experts.{}", _moe(at).ffn, _moe(at).bias),
        True,
    )
    """One after the other; may be read while it is iterated, and then only once."""
    selection_bias: Float[Tensor, " e"] | None = _vector(
        "mlp.gate.e_score_correction_bias", _per_expert, lambda at: _moe(at).selection_bias
    )
    """Added to the router's scores where experts are chosen, but not to their weights."""
    shared: GatedWeights | None = _part(
        GatedWeights,
        lambda at: _moe(at).shared_ffn > 0,
        lambda at: Place(at.config, at.layer, "mlp.shared_experts", _moe(at).shared_ffn),
    )
    """An expert of all tokens."""
    shared_gate: LinearWeights | None = _linear(
        lambda at: [Rows("mlp.shared_expert_gate", 1)], when=lambda at: _moe(at).shared_gate, narrowest="float32"
    )
    expert_scale: Float[Tensor, " e"] | None = _vector("router.per_expert_scale", _per_expert, _beside_dense)
    """A factor on the weights of each expert."""
    router_norm: Float[Tensor, " d"] | None = _vector(
        "router.scale", lambda at: (at.hidden,), _beside_dense, by_width=True
    )
    input_norm: Float[Tensor, " d"] | None = _norm("pre_feedforward_layernorm_2.weight", _beside_dense)
    output_norm: Float[Tensor, " d"] | None = _norm("post_feedforward_layernorm_2.weight", _beside_dense)
    dense_norm: Float[Tensor, " d"] | None = _norm("post_feedforward_layernorm_1.weight", _beside_dense)
    """Of the output of the dense network."""


def _sizes(at: Place) -> MLAConfig:
    assert at.config.latent is not None
    return at.config.latent


def _with_rotary(sizes: MLAConfig, before: int, blocks: int) -> list[int]:
    """Rows of blocks of `before` and the rotary ones, these in the half-split order."""
    width = before + sizes.rope_dim
    rotary = (
        [*range(before, width, 2), *range(before + 1, width, 2)] if sizes.interleaved_rope else range(before, width)
    )
    return [first + i for first in range(0, blocks * width, width) for i in (*range(before), *rotary)]


def _latent_queries(at: Place, name: str) -> Rows:
    sizes = _sizes(at)
    chosen = _with_rotary(sizes, sizes.nope_dim, at.config.heads)
    return Rows(f"self_attn.{name}", len(chosen), chosen)


def _latent_rows(at: Place) -> list[Rows]:
    """The queries or their latent vector, then what keys and values are made of."""
    sizes = _sizes(at)
    query = Rows("self_attn.q_a_proj", sizes.q_rank) if sizes.q_rank else _latent_queries(at, "q_proj")
    order = _with_rotary(sizes, sizes.kv_rank, 1)
    return [query, Rows("self_attn.kv_a_proj_with_mqa", len(order), order)]


def _expanding(at: Place, value: bool) -> list[Rows]:
    """The rows by head that expand a latent vector, to keys or to values."""
    sizes = _sizes(at)
    first, last = (sizes.nope_dim, sizes.nope_dim + sizes.value_dim) if value else (0, sizes.nope_dim)
    width = sizes.nope_dim + sizes.value_dim
    rows = at.config.heads * width
    chosen = [head + i for head in range(0, rows, width) for i in range(first, last)]
    return [Rows("self_attn.kv_b_proj", rows, chosen)]


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    """What latent attention has between its projections and its output. `key` and `value`, by head, expand a latent
    vector.
    """

    query: LinearWeights | None = _linear(
        lambda at: [_latent_queries(at, "q_b_proj")],
        inputs=lambda at: _sizes(at).q_rank,
        when=lambda at: _sizes(at).q_rank > 0,
    )
    """From the queries' latent vector to the queries; None: they have none."""
    query_norm: Float[Tensor, " q"] | None = _vector(
        "self_attn.q_a_layernorm.weight", lambda at: (_sizes(at).q_rank,), lambda at: _sizes(at).q_rank > 0
    )
    key_norm: Float[Tensor, " r"] = _vector("self_attn.kv_a_layernorm.weight", lambda at: (_sizes(at).kv_rank,))
    key: LinearWeights = _linear(
        lambda at: _expanding(at, False), inputs=lambda at: _sizes(at).kv_rank, narrowest="float"
    )
    value: LinearWeights = _linear(
        lambda at: _expanding(at, True), inputs=lambda at: _sizes(at).kv_rank, narrowest="float"
    )


_STEMS = {DeltaNetConfig: "linear_attn", ShortConvConfig: "conv", Mamba2Config: "mamba"}
"""What the names of a layer with a recurrent state begin with."""


def _stem(at: Place) -> str:
    return _STEMS[type(_state(at))]


def _state(at: Place) -> StateConfig:
    assert at.config.state is not None
    return at.config.state


def _state_rows(at: Place) -> list[Rows]:
    """The input projection: what the convolution reads, then the gates z of the output."""
    c = _state(at)
    if isinstance(c, DeltaNetConfig):
        values = c.value_heads * c.value_dim
        return [Rows("linear_attn.in_proj_qkv", c.shape.channels), Rows("linear_attn.in_proj_z", values)]
    if isinstance(c, ShortConvConfig):
        return [Rows("conv.in_proj", 3 * c.channels)]
    inner, channels, whole = c.heads * c.head_dim, c.shape.channels, _mamba_rows(c)
    return [Rows("mamba.in_proj", whole, (*range(inner, inner + channels), *range(inner)))]


def _mamba_rows(c: Mamba2Config) -> int:
    return c.heads * c.head_dim + c.shape.channels + c.heads


def _gate_rows(at: Place) -> list[Rows]:
    """The gates of the heads: beta and decay of DeltaNet, the time steps of Mamba-2."""
    c = _state(at)
    if isinstance(c, DeltaNetConfig):
        return [Rows(f"linear_attn.in_proj_{name}", c.value_heads) for name in "ba"]
    assert isinstance(c, Mamba2Config)
    whole = _mamba_rows(c)
    return [Rows("mamba.in_proj", whole, range(whole - c.heads, whole))]


def _has_heads(at: Place) -> bool:
    return not isinstance(at.state, ShortConvConfig)


def _state_bias(at: Place) -> bool:
    return not isinstance(at.state, DeltaNetConfig | None) and at.state.bias


def _per_state_head(at: Place) -> tuple[int, ...]:
    return (_state(at).shape.heads,)


def _state_vector(
    name: str, shape: Callable[[Place], tuple[int, ...]] = _per_state_head, when: Callable[[Place], bool] = _has_heads
) -> Any:
    return _vector(lambda at: f"{_stem(at)}.{name}", shape, when)


def _convolution(kind: str) -> Callable[[Place], str]:
    return lambda at: f"{_stem(at)}.{'conv' if isinstance(at.state, ShortConvConfig) else 'conv1d'}.{kind}"


@dataclass(frozen=True, kw_only=True)
class StateWeights:
    """What takes the place of attention between its projections `qkv` and `output`."""

    gates: LinearWeights | None = _linear(
        _gate_rows,
        when=_has_heads,
        bias=lambda at: isinstance(at.state, Mamba2Config) and at.state.bias,
        narrowest="float",
    )
    convolution: Float[Tensor, "c 1 w"] = _vector(
        _convolution("weight"), lambda at: (_state(at).shape.channels, 1, _state(at).shape.taps)
    )
    convolution_bias: Float[Tensor, " c"] | None = _vector(
        _convolution("bias"),
        lambda at: (_state(at).shape.channels,),
        lambda at: at.state.conv_bias if isinstance(at.state, Mamba2Config) else _state_bias(at),
    )
    log_decay: Float[Tensor, " h"] | None = _state_vector("A_log")
    time_bias: Float[Tensor, " h"] | None = _state_vector("dt_bias")
    skip: Float[Tensor, " h"] | None = _state_vector("D", when=lambda at: isinstance(at.state, Mamba2Config))
    norm: Float[Tensor, " n"] | None = _state_vector(
        "norm.weight",
        lambda at: (
            at.state.heads * at.state.head_dim if isinstance(at.state, Mamba2Config) else _state(at).shape.value_dim,
        ),
    )


def _width(at: Place) -> int:
    assert at.config.layer_inputs is not None
    return at.config.layer_inputs.width


@dataclass(frozen=True)
class LayerInputWeights:
    """What a layer does with its own inputs; see `foretell.model.block.layer_inputs.LayerInput`."""

    gate: LinearWeights = _linear(lambda at: [Rows("per_layer_input_gate", _width(at))])
    projection: LinearWeights = _linear(lambda at: [Rows("per_layer_projection", at.hidden)], inputs=_width)
    norm: Float[Tensor, " d"] = _norm("post_per_layer_input_norm.weight")


def _queries(at: Place, gate: bool = False) -> Rows:
    """The queries, or their gates, which a gated attention stores as [query; gate] per head."""
    c, size = at.config, at.head_dim
    rows = c.heads * size
    if not c.attention_gate:
        return Rows("self_attn.q_proj", rows)
    chosen = [i for first in range(size * gate, 2 * rows, 2 * size) for i in range(first, first + size)]
    return Rows("self_attn.q_proj", 2 * rows, chosen)


def _qkv_rows(at: Place) -> list[Rows]:
    if at.state is not None:
        return _state_rows(at)
    if at.latent is not None:
        return _latent_rows(at)
    queries, c = _queries(at), at.config
    if at.reads_keys:
        return [queries]
    rows = c.sizes_of(at.layer).kv_heads * at.head_dim
    values = "k_proj" if c.values_are_keys and not c.window_of(at.layer) else "v_proj"
    return [queries, Rows("self_attn.k_proj", rows), Rows(f"self_attn.{values}", rows)]


def _output_rows(at: Place) -> list[Rows]:
    return [Rows("self_attn.o_proj" if at.state is None else f"{_stem(at)}.out_proj", at.hidden)]


def _mixed(at: Place) -> int:
    """Inputs of the output projection."""
    if isinstance(at.state, ShortConvConfig):
        return at.state.channels
    if at.state is not None:
        return at.state.shape.heads * at.state.shape.value_dim
    if at.latent is not None:
        return at.config.heads * at.latent.value_dim
    return at.config.heads * at.head_dim


def _head_norm(name: str, keys: bool) -> Any:
    """The norm of queries or keys; without weights where the architecture has none."""

    def when(at: Place) -> bool:
        c = at.config
        unit = c.unit_qk_norm and at.layer not in c.unrotated_layers
        return (c.qk_norm or unit) and at.attends and not (keys and at.reads_keys)

    def shape(at: Place) -> tuple[int, ...]:
        sizes = at.config.sizes_of(at.layer)
        heads = sizes.kv_heads if keys else sizes.heads
        return (at.head_dim * (heads if at.config.qk_norm_over == "all" else 1),)

    return _vector(lambda at: name if at.config.qk_norm else None, shape, when, offset=True)


def _mlp_norm(at: Place) -> str:
    if at.config.parallel_blocks:
        return "input_layernorm.weight"
    return f"{'pre_feedforward' if at.config.post_norms else 'post_attention'}_layernorm.weight"


def _shortcut(name: str) -> Any:
    return _linear(
        lambda at: [Rows(name, at.hidden)], when=lambda at: at.config.shortcuts and at.attends, narrowest="float"
    )


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """The weights of one decoder block. None: the layer has none. Norms hold what normed numbers are multiplied with:
    the offset of the architecture is in them.
    """

    qkv: LinearWeights | None = _linear(
        _qkv_rows,
        when=lambda at: at.mixes,
        bias=lambda at: at.config.qkv_bias if at.attends else _state_bias(at),
        factor="self_attn.qkv_v_proj",
    )
    """All query heads, all key heads, all value heads; queries alone where keys and values are those of an earlier
    layer; or the input projection of what takes the place of attention.
    """
    output: LinearWeights | None = _linear(
        _output_rows,
        inputs=_mixed,
        when=lambda at: at.mixes,
        bias=lambda at: at.config.output_bias if at.attends else _state_bias(at),
        factor="self_attn.o_v_proj",
    )
    attention_gate: LinearWeights | None = _linear(
        lambda at: [_queries(at, gate=True)],
        when=lambda at: at.config.attention_gate and at.attends,
        bias=lambda at: at.config.qkv_bias,
    )
    """A gate per query head, whose sigmoid multiplies the output of attention."""
    mlp: GatedWeights | None = _part(
        GatedWeights,
        lambda at: at.is_dense,
        lambda at: Place(at.config, at.layer, "mlp", at.config.ffn_of(at.layer), at.config.mlp_bias),
    )
    attention_shortcut: LinearWeights | None = _shortcut("attention_shortcut")
    """Multiplies the residual stream before the output of attention is added (SliceGPT, arXiv 2401.15024)."""
    mlp_shortcut: LinearWeights | None = _shortcut("mlp_shortcut")
    """The same before the output of the feed-forward network."""
    attention_norm: Float[Tensor, " d"] | None = _norm(
        "input_layernorm.weight", lambda at: at.mixes and at.config.pre_norms
    )
    mlp_norm: Float[Tensor, " d"] | None = _norm(_mlp_norm, lambda at: at.config.pre_norms)
    q_norm: Float[Tensor, " e"] | None = _head_norm("self_attn.q_norm.weight", keys=False)
    k_norm: Float[Tensor, " e"] | None = _head_norm("self_attn.k_norm.weight", keys=True)
    v_norm: Float[Tensor, " e"] | None = _vector(
        lambda at: None, lambda at: (at.head_dim,), lambda at: at.config.value_norm and at.attends and not at.reads_keys
    )
    post_attention_norm: Float[Tensor, " d"] | None = _norm(
        "post_attention_layernorm.weight", lambda at: at.config.post_norms and at.attends
    )
    post_mlp_norm: Float[Tensor, " d"] | None = _norm(
        "post_feedforward_layernorm.weight", lambda at: at.config.post_norms and at.attends
    )
    sinks: Float[Tensor, " h"] | None = _vector(
        "self_attn.sinks", lambda at: (at.config.heads,), lambda at: at.layer in at.config.sink_layers and at.attends
    )
    """A score per query head that joins the softmax over its keys (gpt-oss, arXiv 2508.10925)."""
    scale: Float[Tensor, " 1"] | None = _vector("layer_scalar", lambda at: (1,), lambda at: at.config.layer_scales)
    """Multiplies the residual stream after the block."""
    experts: ExpertWeights | None = _part(ExpertWeights, lambda at: at.experts is not None)
    latent: LatentWeights | None = _part(LatentWeights, lambda at: at.latent is not None)
    mixer: StateWeights | None = _part(StateWeights, lambda at: at.state is not None)
    layer_input: LayerInputWeights | None = _part(LayerInputWeights, lambda at: at.config.layer_inputs is not None)


def _linears(kind: type[Any], path: str = "") -> Iterator[tuple[str, LinearSpec]]:
    """The linear layers of a part by their paths."""
    for name, spec in specs_of(kind).items():
        if isinstance(spec, LinearSpec):
            yield f"{path}{name}", spec
        elif isinstance(spec, PartSpec):
            yield from _linears(spec.kind, f"{path}{name}.")


LINEARS: Mapping[str, LinearSpec] = dict(_linears(BlockWeights))
"""All linear layers of a block by their paths, as `mlp.gate_up`."""

VECTORS = tuple(
    name for name, spec in specs_of(BlockWeights).items() if isinstance(spec, VectorSpec) and name != "scale"
)
"""The block's own norms and vectors."""
