"""Qwen: biases, norms of queries and keys, experts beside a shared one that has a gate; from Qwen3-Next on gated
attention beside layers of Gated DeltaNet.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from foretell.model.config.families.base import Family, Kind, PredictionNames, Rows, gguf_experts, no_windows, windowed
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.config.states import DeltaNetConfig, layers_of_type
from foretell.utils.validation import Fields

_DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_HYBRID: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "hidden_act": "silu",
}  # fmt: skip
_HYBRID_SETTINGS: Mapping[str, Any] = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
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


QWEN = Family(
    kinds={
        "qwen2": Kind({"qkv_bias": True}, {**_DEFAULTS, "num_key_value_heads": 32}),
        "qwen3": Kind({"qk_norm": True}, {**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128}, True),
    },
    gguf_kinds={"qwen2": "qwen2", "qwen3": "qwen3"},
    read_windows=_windows,
)


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
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
    gguf_names={
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    },
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
_PREDICTION = PredictionNames("mtp.layers.0.", "mtp.norm", "mtp.fc", *_NORMS, norms_states=True)
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
QWEN3_5 = Family(
    kinds={
        "qwen3_5_text": Kind(_HYBRID_SETTINGS, {**_HYBRID, "num_key_value_heads": 4}, True, text_of="qwen3_5"),
        "qwen3_5_moe_text": Kind(
            _HYBRID_SETTINGS, {**_SPARSE, "num_experts": 256, "num_experts_per_tok": 8}, True, text_of="qwen3_5_moe"
        ),
    },
    names=_SHARED_EXPERT,
    prediction=lambda kind, layers: _PREDICTION,
    read_windows=no_windows,
    read_experts=lambda read, kind, layers: _experts(read, kind, layers) if kind == "qwen3_5_moe_text" else None,
    read_state=_state,
)
