"""GLM-4-0414: norms after attention and feed-forward, half of each head rotated in pairs side by side."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, interleaved_qkv, no_windows
from foretell.model.config.families.phi3 import PHI3
from foretell.utils.validation import Fields


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    if any(read.integers("rope.dimension_sections")):
        raise read.wrong("rope.dimension_sections", "left out: the rows of GLM-4V are not supported", "sections")
    return {}


_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
GLM4 = Family(
    kinds={"glm4": Kind({"post_norms": True}, _DEFAULTS)},
    names={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    rows={"qkv": interleaved_qkv, "mlp.gate_up": PHI3.rows["mlp.gate_up"]},
    gguf_kinds={"glm4": "glm4"},
    gguf_names={
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    read_gguf=_read_gguf,
    read_windows=no_windows,
    read_further=lambda read, kind, values: {"qkv_bias": read.flag("attention_bias", default=True)},
)
