"""Hunyuan, dense (V1): norms of queries and keys after their rotation."""

from collections.abc import Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind, no_windows
from foretell.utils.validation import Fields

_THETA = 10000.0


def _prepare(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The configuration with a `rope_theta` in place of a fixed `alpha`, which only stretches it."""
    read = Fields(raw, source)
    scaling, parameters = read.fields("rope_scaling"), read.fields("rope_parameters")
    holder = scaling if scaling.raw else parameters
    if holder.text("rope_type", "type", default="default") != "dynamic" or not holder.number("alpha", default=0.0):
        return raw
    width = read.integer("head_dim", default=read.integer("hidden_size") // read.integer("num_attention_heads"))
    theta = holder.positive("rope_theta", default=read.positive("rope_theta", default=_THETA))
    stretched = theta * holder.positive("alpha") ** (width / (width - 2))
    return {**raw, "rope_scaling": None, "rope_parameters": {"rope_theta": stretched}}


_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HUNYUAN = Family(
    kinds={"hunyuan_v1_dense": Kind({"qk_norm": True, "qk_norm_over": "rotated"}, _DEFAULTS, optional_bias=True)},
    names={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
    gguf_kinds={"hunyuan-dense": "hunyuan_v1_dense"},
    gguf_names={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    prepare=_prepare,
    read_windows=no_windows,
)
