"""Llama 4: attention within chunks, layers without rotary positions, experts beside a shared one."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foretell.model.config.attention import QueryScaling
from foretell.model.config.families.base import GGUF_SIGMOID, Family, Kind, gguf_routed_experts, interleaved_qkv
from foretell.model.config.rope import read_rope
from foretell.utils.validation import Fields

_CHUNK = 8192
_MAVERICK = 128
"""Experts of the model that has no norms of queries and keys."""
_TYPES = ("chunked_attention", "full_attention")


def _read(read: Fields, layers: int) -> dict[str, Any]:
    """The values of `ModelConfig` that are Llama 4's own."""
    interval = read.integer("no_rope_layer_interval", default=4, least=1)
    rotated = read.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(layers))
    if len(rotated) < layers:
        raise read.wrong("no_rope_layers", f"{layers} of 0 (not rotated) or 1", list(rotated))
    types = read.texts("layer_types") or tuple(_TYPES[not one] for one in rotated[:layers])
    if len(types) != layers or not set(types) <= set(_TYPES):
        raise read.wrong("layer_types", f"{layers} of {' or '.join(_TYPES)}", list(types))
    head_dim = read.integer("head_dim", default=128, least=2)
    scaling, parameters = read.fields("rope_scaling"), read.fields("rope_parameters")
    trained, theta = read.integer("max_position_embeddings", least=1), read.positive("rope_theta", default=500000.0)
    biased = read.flag("attention_bias", default=False)
    sparse = _sparse_layers(read, layers)
    return {
        "head_dim": head_dim,
        "kv_heads": read.integer("num_key_value_heads", default=8, least=1),
        "ffn": read.integer("intermediate_size_mlp", default=16384, least=1),
        "rope": read_rope(scaling if scaling.raw else parameters, theta, trained, head_dim, read),
        "unrotated_layers": tuple(i for i in range(layers) if not rotated[i]),
        "window": read.integer("attention_chunk_size", default=_CHUNK, least=1),
        "window_layers": tuple(i for i, kind in enumerate(types) if kind == _TYPES[0]),
        "chunked": True,
        "unit_qk_norm": read.flag("use_qk_norm", default=True),
        "query_scaling": _query_scaling(read),
        "qkv_bias": biased,
        "output_bias": biased,
        "experts": _experts(read, sparse) if sparse else None,
    }


def _query_scaling(read: Fields) -> QueryScaling | None:
    """Published files have an integer for `attn_temperature_tuning`, configurations of transformers a flag."""
    if not read.raw.get("attn_temperature_tuning", True):
        return None
    return QueryScaling(
        factor=read.number("attn_scale", default=0.1),
        interval=read.integer("floor_scale", default=8192, least=1),
        offset=1,
        unrotated_only=True,
    )


def _sparse_layers(read: Fields, layers: int) -> tuple[int, ...]:
    if read.raw.get("moe_layers") is not None:
        return tuple(i for i in read.integers("moe_layers") if 0 <= i < layers)
    step = read.integer("interleave_moe_layer_step", default=1, least=1)
    return tuple(range(step - 1, layers, step))


def _experts(read: Fields, layers: tuple[int, ...]) -> dict[str, Any]:
    count, ffn = read.integer("num_local_experts", default=16, least=1), read.integer("intermediate_size", least=1)
    return {
        "count": count,
        "active": read.integer("num_experts_per_tok", default=1, least=1, most=count),
        "ffn": ffn,
        "shared_ffn": ffn,
        "renormalize": False,
        "scoring": "sigmoid",
        "layers": layers,
        "weighs_inputs": True,
    }


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """What llama.cpp knows of Llama 4 without the file: chunks of 8,192, a fourth of the layers without positions."""
    layers, step = values["layers"], read.integer("interleave_moe_layer_step", default=1)
    if not read.integer("attention.sliding_window", default=_CHUNK):
        raise read.wrong("attention.sliding_window", "left out: MobileLLM is not supported", 0)
    full, experts = tuple(range(3, layers, 4)), None
    if step:
        experts = gguf_routed_experts(read, tuple(range(step - 1, layers, step)), tensors, GGUF_SIGMOID)
        experts = replace(experts, scoring="sigmoid", weighs_inputs=True, shared_ffn=experts.ffn, renormalize=False)
    return {
        "unrotated_layers": full,
        "window": _CHUNK,
        "window_layers": tuple(i for i in range(layers) if i not in full),
        "chunked": True,
        "unit_qk_norm": experts is None or experts.count != _MAVERICK,
        "query_scaling": _query_scaling(Fields({}, read.source)),
        "experts": experts,
    }


_LLAMA4: Mapping[str, Any] = {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA4 = Family(
    kinds={
        "llama4_text": Kind(
            defaults=_LLAMA4,
            text_of="llama4",
        )
    },
    names={
        "mlp": "feed_forward",
        "mlp.gate": "feed_forward.router",
        "mlp.shared_experts": "feed_forward.shared_expert",
    },
    rows={"qkv": interleaved_qkv},
    expert_storage="transposed",
    gguf_kinds={"llama4": "llama4_text"},
    gguf_names={
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
        "feed_forward.router": "ffn_gate_inp",
        **{
            f"feed_forward.{part}.{name}_proj": f"ffn_{name}_{end}"
            for part, end in (("experts.{}", "exps"), ("shared_expert", "shexp"))
            for name in ("gate", "up", "down")
        },
    },
    read_gguf=_read_gguf,
    read_all=_read,
)
