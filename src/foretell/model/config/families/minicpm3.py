"""MiniCPM3 (arXiv 2404.06395): latent attention, multipliers of embedding, residual stream and logits."""

from collections.abc import Collection, Mapping
from typing import Any

from foretell.model.config.families.base import Family, Kind
from foretell.model.config.families.deepseek import DEEPSEEK
from foretell.model.config.model import MLAConfig
from foretell.utils.validation import Fields

_SIZES = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
_SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
"""What llama.cpp takes for every file, and transformers where a configuration has none."""


def _prepare(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The configuration with the share of a head that is rotated, by which the factors of its positions are counted."""
    read = Fields({**_SIZES, **raw}, source)
    rotary = read.integer("qk_rope_head_dim", least=2)
    return {**raw, "partial_rotary_factor": rotary / (read.integer("qk_nope_head_dim", least=1) + rotary)}


def _scales(read: Fields, values: Mapping[str, Any]) -> Mapping[str, float]:
    hidden, layers = values["hidden"], values["layers"]
    return {
        "embedding_scale": read.positive("scale_emb"),
        "residual_scale": read.positive("scale_depth", default=layers**0.5) / layers**0.5,
        "logit_scale": read.positive("dim_model_base", default=hidden) / hidden,
    }


def _further(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    if read.flag("attention_bias", default=False):
        raise read.wrong("attention_bias", "false: latent attention with biases is not supported", True)
    latent = MLAConfig(
        q_rank=read.integer("q_lora_rank", default=0),
        kv_rank=read.integer("kv_lora_rank", least=1),
        nope_dim=read.integer("qk_nope_head_dim", least=1),
        rope_dim=read.integer("qk_rope_head_dim", least=2),
        value_dim=read.integer("v_head_dim", default=values["hidden"] // values["heads"], least=1),
        interleaved_rope=False,
    )
    return {"latent": latent, "kv_heads": values["heads"], **_scales(read, values)}


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    rotary = read.integer("rope.dimension_count", least=2)
    latent = MLAConfig(
        q_rank=read.integer("attention.q_lora_rank", least=1),
        kv_rank=read.integer("attention.kv_lora_rank", least=1),
        nope_dim=values["head_dim"] - rotary,
        rope_dim=rotary,
        value_dim=values["hidden"] // values["heads"],
        interleaved_rope=False,
    )
    scales = _scales(Fields(_SCALES, read.source), values)
    return {"latent": latent, "kv_heads": values["heads"], **scales}


_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, **_SIZES, **_SCALES,
}  # fmt: skip
MINICPM3 = Family(
    kinds={"minicpm3": Kind({"tied": True}, _DEFAULTS)},
    gguf_kinds={"minicpm3": "minicpm3"},
    gguf_names=DEEPSEEK.gguf_names,
    read_gguf=_read_gguf,
    prepare=_prepare,
    read_head_dim=lambda read, default: read.integer("qk_nope_head_dim") + read.integer("qk_rope_head_dim"),
    read_further=_further,
)
