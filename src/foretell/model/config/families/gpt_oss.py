"""gpt-oss (arXiv 2508.10925): a score per query head beside those of the keys, experts with biases."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foretell.model.config.families.base import Family, Kind, gguf_experts, gguf_windows, windowed
from foretell.model.config.families.mixtral import MIXTRAL
from foretell.model.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, MoEConfig
from foretell.utils.validation import Fields


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    experts = MIXTRAL.read_experts(read, kind, layers)
    return None if experts is None else replace(experts, router_bias=True, bias=True)


def _activation(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The activation, whose constants are fixed here, and what all layers have."""
    for name, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if read.number(name) != known:
            raise read.wrong(name, f"{known}: no other value is supported", read.raw[name])
    return {"activation": "clamped_swiglu", "sink_layers": tuple(range(values["layers"]))}


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    layers = values["layers"]
    return {
        **gguf_windows(read, layers, 2),
        "qkv_bias": True,
        "output_bias": True,
        "activation": "clamped_swiglu",
        "sink_layers": tuple(range(layers)),
        "rope": replace(values["rope"], truncate=False),
        "experts": replace(gguf_experts(read, layers), router_bias=True, bias=True),
    }


_GPT_OSS: Mapping[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "num_experts_per_tok": 4, "num_local_experts": 128, "sliding_window": 128,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
    },
    "attention_bias": True, "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT,
}  # fmt: skip
GPT_OSS = Family(
    kinds={"gpt_oss": Kind(defaults=_GPT_OSS, optional_bias=True)},
    names={"mlp.gate": "mlp.router"},
    expert_storage="alternating",
    gguf_kinds={"gpt-oss": "gpt_oss"},
    gguf_names={
        "mlp.router": "ffn_gate_inp",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks.weight",
    },
    read_gguf=_read_gguf,
    read_windows=lambda read, kind, layers: windowed(read, layers, lambda: tuple(range(0, layers, 2))),
    read_experts=_experts,
    read_further=_activation,
)
