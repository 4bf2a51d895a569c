"""Qwen: biases, norms of queries and keys, experts beside a shared one that has a gate; from Qwen3-Next on gated
attention beside layers of Gated DeltaNet.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from foretell.model.config.families.base import (
    Family,
    Kind,
    PredictionNames,
    Rows,
    fused_experts,
    gguf_experts,
    no_windows,
    windowed,
)
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.config.states import DeltaNetConfig, layers_of_type
from foretell.utils.validation import Fields

_DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_HYBRID: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "hidden_act": "silu",
}  # fmt: skip
_HYBRID_SETTINGS: Mapping[str, Any] = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
_SHARED_GGUF = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_SHARED_EXPERT = {"mlp.shared_experts": "mlp.shared_expert"}
_LINEAR, _FULL = "linear_attention", "full_attention"


def _windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    if not read.flag("use_sliding_window", default=False):
        return 0, ()
    full = read.integer("max_window_layers", default=layers)
    chosen = {"qwen2_moe": range(0, min(full, layers), 2), "qwen3_moe": range(layers)}.get(kind, range(full, layers))
    return windowed(read, layers, lambda: tuple(chosen), types=kind != "qwen3_moe")


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig:
    count = read.integer("num_local_experts", "num_experts", least=1)
    active = read.integer("num_experts_per_tok", least=1, most=count)
    step, dense = read.integer("decoder_sparse_step", default=1, least=1), read.integers("mlp_only_layers")
    shared = read.integer("shared_expert_intermediate_size", default=0) if kind != "qwen3_moe" else 0
    return MoEConfig(
        count=count,
        active=active,
        ffn=read.integer("moe_intermediate_size", least=1),
        shared_ffn=shared,
        shared_gate=shared > 0,
        renormalize=read.flag("norm_topk_prob", default=kind == "qwen3_5_moe_text"),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _state(read: Fields, kind: str, layers: int) -> DeltaNetConfig:
    interval = read.integer("full_attention_interval", default=4, least=1)
    chosen = layers_of_type(read, layers, _LINEAR, [_LINEAR if (i + 1) % interval else _FULL for i in range(layers)])
    keys = read.integer("linear_num_key_heads", default=16, least=1)
    values = read.integer("linear_num_value_heads", default=32, least=1)
    if values % keys:
        raise read.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {keys}", values)
    return DeltaNetConfig(
        layers=chosen,
        key_heads=keys,
        value_heads=values,
        key_dim=read.integer("linear_key_head_dim", default=128, least=1),
        value_dim=read.integer("linear_value_head_dim", default=128, least=1),
        taps=read.integer("linear_conv_kernel_dim", default=4, least=1),
    )


_QWEN2 = Kind({"qkv_bias": True}, {**_DEFAULTS, "num_key_value_heads": 32})
_AT = "model.mtp_layers.0."
_MIMO = PredictionNames(
    _AT, f"{_AT}final_layernorm", f"{_AT}input_proj", f"{_AT}token_layernorm", f"{_AT}hidden_layernorm",
    before_norm=True,
)  # fmt: skip
QWEN = Family(
    kinds={
        "qwen2": _QWEN2,
        "mimo": _QWEN2,
        "qwen3": Kind({"qk_norm": True}, {**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128}, True),
    },
    gguf_kinds={"qwen2": "qwen2", "qwen3": "qwen3"},
    prediction=lambda kind, layers: _MIMO if kind == "mimo" else None,
    read_windows=_windows,
)


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    experts = gguf_experts(read, values["layers"])
    if kind == "qwen2_moe":
        narrow, shared = values["ffn"] // experts.active, "expert_shared_feed_forward_length"
        width = read.integer(shared, default=values["ffn"])
        ffn = read.integer("expert_feed_forward_length", default=narrow, least=1)
        experts = replace(experts, ffn=ffn, shared_ffn=width, shared_gate=width > 0, renormalize=False)
    return {"experts": experts}


_QWEN2_MOE: Mapping[str, Any] = {
    **_DEFAULTS, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
_QWEN3_MOE: Mapping[str, Any] = {
    **_DEFAULTS, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
QWEN_MOE = Family(
    kinds={
        "qwen2_moe": Kind(
            settings={"qkv_bias": True},
            defaults=_QWEN2_MOE,
        ),
        "qwen3_moe": Kind(
            settings={"qk_norm": True},
            defaults=_QWEN3_MOE,
            optional_bias=True,
        ),
    },
    names=_SHARED_EXPERT,
    gguf_kinds={"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"},
    read_gguf=_read_gguf,
    gguf_names=_SHARED_GGUF,
    read_windows=_windows,
    read_experts=_experts,
    read_further=lambda read, kind, values: (
        {"qkv_bias": read.flag("qkv_bias", default=True)} if kind == "qwen2_moe" else {}
    ),
)


def _grouped(name: str, key_heads: int, parts: list[int]) -> list[Rows]:
    """Parts that a checkpoint stores per key head, in the order of the parts."""
    width, ends = sum(parts), [*accumulate(parts)]
    places = [range(end - part, end) for part, end in zip(parts, ends, strict=True)]
    chosen = [group * width + i for place in places for group in range(key_heads) for i in place]
    return [Rows(name, key_heads * width, chosen)]


def _projections(config: ModelConfig, layer: int) -> list[Rows] | None:
    """Of [q, k, v, z] per key head."""
    c = config.state
    if not isinstance(c, DeltaNetConfig) or layer not in config.state_layers:
        return None
    values = c.value_heads // c.key_heads * c.value_dim
    return _grouped("linear_attn.in_proj_qkvz", c.key_heads, [c.key_dim, c.key_dim, values, values])


def _gates(config: ModelConfig, layer: int) -> list[Rows] | None:
    """Of [b, a] per key head."""
    c = config.state
    assert isinstance(c, DeltaNetConfig)
    return _grouped("linear_attn.in_proj_ba", c.key_heads, [c.value_heads // c.key_heads] * 2)


_NORMS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
_PREDICTION = PredictionNames("mtp.layers.0.", "mtp.norm", "mtp.fc", *_NORMS)
_SPARSE: Mapping[str, Any] = {
    **_HYBRID, "num_key_value_heads": 2, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
QWEN3_NEXT = Family(
    kinds={"qwen3_next": Kind(_HYBRID_SETTINGS, {**_SPARSE, "num_experts": 512}, True)},
    names=_SHARED_EXPERT,
    rows={"qkv": _projections, "mixer.gates": _gates},
    prediction=lambda kind, layers: _PREDICTION,
    read_windows=no_windows,
    read_experts=_experts,
    read_state=_state,
)
_NEXT = "qwen3next"
"""The architecture in GGUF of Qwen3-Next, which has the projections of Qwen3.5 there."""


def _delta(config: ModelConfig) -> DeltaNetConfig:
    assert isinstance(config.state, DeltaNetConfig)
    return config.state


def _gguf_heads(config: ModelConfig, kind: str) -> list[int] | None:
    """Places in GGUF of the value heads: those of a key head are apart, except in Qwen3-Next; None: in their order."""
    c = _delta(config)
    shared = c.value_heads // c.key_heads
    if kind == _NEXT or shared == 1:
        return None
    return [i * c.key_heads + key for key in range(c.key_heads) for i in range(shared)]


def _gguf_values(config: ModelConfig, kind: str, first: int = 0) -> list[int] | None:
    """Places in GGUF of the numbers of the value heads; `first`: what comes before them."""
    heads, width = _gguf_heads(config, kind), _delta(config).value_dim
    return None if heads is None else [first + head * width + i for head in heads for i in range(width)]


def _gguf_channels(config: ModelConfig, kind: str) -> list[int] | None:
    """Places in GGUF of the channels of the convolution."""
    c = _delta(config)
    keys = 2 * c.key_heads * c.key_dim
    values = _gguf_values(config, kind, keys)
    return None if values is None else [*range(keys), *values]


def _gguf_gates(config: ModelConfig, kind: str, name: str, which: int) -> list[Rows] | None:
    c = _delta(config)
    if kind != _NEXT:
        return _reordered(name, _gguf_heads(config, kind))
    shared = c.value_heads // c.key_heads
    chosen = [(2 * key + which) * shared + i for key in range(c.key_heads) for i in range(shared)]
    return [Rows("ssm_ba", 2 * c.value_heads, chosen)]


def _reordered(name: str, order: Sequence[int] | None) -> list[Rows] | None:
    return None if order is None else [Rows(name, len(order), order)]


def _chosen(stored: Any, order: Sequence[int] | None) -> Any:
    return stored if order is None else stored[list(order)]


def _read_gguf_hybrid(
    read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]
) -> Mapping[str, Any]:
    """GGUF files hold the weights of norms with the offset added."""
    layers, interval = values["layers"], read.integer("full_attention_interval", default=4, least=1)
    keys, heads = read.integer("ssm.group_count", least=1), read.integer("ssm.time_step_rank", least=1)
    inner = read.integer("ssm.inner_size", least=1)
    if heads % keys or inner % heads:
        raise read.wrong("ssm.time_step_rank", f"a multiple of {keys} and a divisor of {inner}", heads)
    state = DeltaNetConfig(
        layers=tuple(i for i in range(layers) if (i + 1) % interval),
        key_heads=keys,
        value_heads=heads,
        key_dim=read.integer("ssm.state_size", least=1),
        value_dim=inner // heads,
        taps=read.integer("ssm.conv_kernel", least=1),
    )
    experts = None
    if kind == "qwen3_5_moe_text":
        shared = read.integer("expert_shared_feed_forward_length", default=0)
        experts = replace(gguf_experts(read, layers), shared_ffn=shared, shared_gate=shared > 0)
    return {"state": state, "experts": experts, "norm_offset": 0.0}


QWEN3_5 = Family(
    kinds={
        "qwen3_5_text": Kind(_HYBRID_SETTINGS, {**_HYBRID, "num_key_value_heads": 4}, True, text_of="qwen3_5"),
        "qwen3_5_moe_text": Kind(
            _HYBRID_SETTINGS, {**_SPARSE, "num_experts": 256, "num_experts_per_tok": 8}, True, text_of="qwen3_5_moe"
        ),
    },
    names=_SHARED_EXPERT,
    prediction=lambda kind, layers: _PREDICTION,
    gguf_kinds={"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", _NEXT: "qwen3_5_moe_text"},
    gguf_names={
        **_SHARED_GGUF,
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
    },
    gguf_rows={
        **fused_experts("mlp.experts"),
        "linear_attn.in_proj_qkv": lambda config, kind: _reordered("attn_qkv", _gguf_channels(config, kind)),
        "linear_attn.in_proj_z": lambda config, kind: _reordered("attn_gate", _gguf_values(config, kind)),
        "linear_attn.in_proj_b": lambda config, kind: _gguf_gates(config, kind, "ssm_beta", 0),
        "linear_attn.in_proj_a": lambda config, kind: _gguf_gates(config, kind, "ssm_alpha", 1),
    },
    gguf_inputs={"linear_attn.out_proj": lambda config, kind: _gguf_values(config, kind)},
    gguf_vectors={
        "linear_attn.A_log": lambda stored, config, kind: _chosen(-stored, _gguf_heads(config, kind)).log(),
        "linear_attn.dt_bias": lambda stored, config, kind: _chosen(stored, _gguf_heads(config, kind)),
        "linear_attn.conv1d.weight": lambda stored, config, kind: _chosen(stored, _gguf_channels(config, kind)),
    },
    prepare_gguf=lambda raw: {"feed_forward_length": raw.get("expert_feed_forward_length"), **raw},
    read_gguf=_read_gguf_hybrid,
    read_windows=no_windows,
    read_experts=lambda read, kind, layers: _experts(read, kind, layers) if kind == "qwen3_5_moe_text" else None,
    read_state=_state,
)
