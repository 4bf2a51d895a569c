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


def _latent(sizes: tuple[int, ...], values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"latent": MLAConfig(*sizes, interleaved_rope=False), "kv_heads": values["heads"]}


def _further(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    if read.flag("attention_bias", default=False):
        raise read.wrong("attention_bias", "false: latent attention with biases is not supported", True)
    sizes = tuple(read.integer(n, default=0) for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"))
    rotary, width = read.integer("qk_rope_head_dim"), values["hidden"] // values["heads"]
    return _latent((*sizes, rotary, read.integer("v_head_dim", default=width)), values) | _scales(read, values)


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    sizes = tuple(read.integer(f"attention.{n}_lora_rank", least=1) for n in ("q", "kv"))
    rotary, width = read.integer("rope.dimension_count", least=2), values["hidden"] // values["heads"]
    latent = _latent((*sizes, values["head_dim"] - rotary, rotary, width), values)
    return latent | _scales(Fields(_SCALES, read.source), values)


_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, **_SIZES, **_SCALES,
}  # fmt: skip
MINICPM3 = Family(
    kinds={"minicpm3": Kind({"tied": True}, _DEFAULTS)},
    gguf_kinds={"minicpm3": "minicpm3"},
    gguf_names=DEEPSEEK.gguf_names,
    read_gguf=_read_gguf,
    prepare=_prepare,
    read_head_dim=DEEPSEEK.read_head_dim,
    read_further=_further,
)
