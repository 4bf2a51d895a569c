"""DeepSeek-V2, V3 and V3.2 (arXiv 2405.04434, 2412.19437, 2512.02556), GLM-4.5 and GLM-5: experts in groups beside
shared ones, and latent attention in all but GLM-4.5. V3.2 and GLM-5 attend to the `index_topk` tokens that an indexer
chooses: to all, as the decoder here does, in texts that are no longer.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import log
from typing import Any

from foretell.model.config.families.base import (
    GGUF_SIGMOID,
    GGUF_SOFTMAX,
    Family,
    Kind,
    PredictionNames,
    gguf_routed_experts,
)
from foretell.model.config.model import MLAConfig, ModelConfig, MoEConfig
from foretell.model.config.rope import RopeConfig
from foretell.utils.validation import Fields

_SPARSE = "glm_moe_dsa", "deepseek_v32"
_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig:
    """The mixture of experts of DeepSeek-V2 (softmax), and of DeepSeek-V3 and GLM (sigmoid, a bias that selects)."""
    softmax = kind == "deepseek_v2"
    method = read.text("topk_method", default="greedy" if softmax else "noaux_tc")
    known = ("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)
    for name, value, allowed in (
        ("topk_method", method, known),
        ("scoring_func", read.text("scoring_func", default=""), ("", "softmax" if softmax else "sigmoid")),
        ("moe_layer_freq", read.integer("moe_layer_freq", default=1), (1,)),
        ("norm_topk_prob", softmax and read.flag("norm_topk_prob", default=False), (False,)),
    ):
        if value not in allowed:
            raise read.wrong(name, f"{' or '.join(str(a) for a in allowed if a != '')} for {kind}", value)
    count, ffn = read.integer("n_routed_experts", least=1), read.integer("moe_intermediate_size", least=1)
    grouped = method != "greedy"
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=ffn,
        shared_ffn=read.integer("n_shared_experts", default=0) * ffn,
        renormalize=not softmax and read.flag("norm_topk_prob", default=True),
        layers=_sparse_layers(read, kind, layers),
        scoring="softmax" if softmax else "sigmoid",
        selection_bias=not softmax,
        groups=read.integer("n_group", default=1, least=1) if grouped else 1,
        active_groups=read.integer("topk_group", default=1, least=1) if grouped else 1,
        ranked_by=1 if softmax else 2,
        scale=read.number("routed_scaling_factor", default=1.0),
    )


def _sparse_layers(read: Fields, kind: str, layers: int) -> tuple[int, ...]:
    types = read.texts("mlp_layer_types") if kind in ("glm4_moe_lite", *_SPARSE) else ()
    if types:
        if len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise read.wrong("mlp_layer_types", f"{layers} of dense or sparse", list(types))
        return tuple(i for i, each in enumerate(types) if each == "sparse")
    dense = 1 if kind == "glm4_moe_lite" else read.integer("first_k_dense_replace", default=0)
    return tuple(range(dense, layers))


def _latent(read: Fields) -> MLAConfig:
    if read.flag("attention_bias", default=False):
        raise read.wrong("attention_bias", "false: latent attention with biases is not supported", True)
    rope_dim = read.integer("qk_rope_head_dim", least=2)
    if rope_dim % 2:
        raise read.wrong("qk_rope_head_dim", "even, for rotary positions", rope_dim)
    return MLAConfig(
        q_rank=read.integer("q_lora_rank", default=0),
        kv_rank=read.integer("kv_lora_rank", least=1),
        nope_dim=read.integer("qk_nope_head_dim", least=1),
        rope_dim=rope_dim,
        value_dim=read.integer("v_head_dim", least=1),
        interleaved_rope=read.flag("rope_interleave", default=True),
    )


def _latent_head_dim(read: Fields, default: int) -> int:
    latent = _latent(read)
    return latent.nope_dim + latent.rope_dim


def _further(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    latent, rope = _latent(read), values["rope"]
    if rope.fraction != 1:
        raise read.wrong("partial_rotary_factor", "1 for latent attention", rope.fraction)
    rope = replace(rope, fraction=latent.rope_dim / (latent.nope_dim + latent.rope_dim))
    scale = _attention_scale(read, rope, values["head_dim"])
    dense = _dense_context(values, read.integer("index_topk", default=2048, least=1)) if kind in _SPARSE else {}
    return {"latent": latent, "kv_heads": values["heads"], "rope": rope, "attention_scale": scale, **dense}


def _dense_context(values: Mapping[str, Any], chosen: int) -> Mapping[str, int]:
    """The context of a model whose layers attend to so many tokens."""
    return {"context": min(values["context"], chosen), "longest_context": 0, "dense_context": chosen}


def _attention_scale(read: Fields, rope: RopeConfig, head_dim: int) -> float:
    """Factor on query-key products, which YaRN's `mscale_all_dim` changes."""
    scaling = read.fields("rope_scaling")
    holder = scaling if scaling.raw else read.fields("rope_parameters")
    mscale = holder.number("mscale_all_dim", default=0.0, least=0)
    scale: float = head_dim**-0.5
    return scale if rope.kind == "default" else scale * (0.1 * mscale * log(max(rope.factor, 1.0)) + 1) ** 2


def _prediction(kind: str, layers: int) -> PredictionNames | None:
    at = f"model.layers.{layers}."
    if kind == "deepseek_v2":
        return None
    return PredictionNames(
        layer=at,
        norm=f"{at}shared_head.norm",
        combine=f"{at}eh_proj",
        embedding_norm=f"{at}enorm",
        hidden_norm=f"{at}hnorm",
        several=True,
    )


_DEEPSEEK_V3: Mapping[str, Any] = {
    "max_position_embeddings": 4096, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "q_lora_rank": 1536,
    **_HEADS,
}  # fmt: skip
_GLM4_MOE_LITE: Mapping[str, Any] = {
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "q_lora_rank": 768, **_HEADS, "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}  # fmt: skip
_GLM_MOE_DSA: Mapping[str, Any] = {
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "q_lora_rank": 2048, "first_k_dense_replace": 3, **_HEADS,
    "qk_nope_head_dim": 192, "v_head_dim": 256,
}  # fmt: skip
GGUF_EXPERTS = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_GGUF_MSCALE = "rope.scaling.yarn_log_multiplier"


def _join_latent(keys: Any, values: Any, config: ModelConfig) -> Any:
    """The matrix that expands latent vectors, from keys [heads, rank, width] and values [heads, width, rank]."""
    c = config.latent
    assert c is not None
    whole = values.new_empty(config.heads, c.nope_dim + c.value_dim, c.kv_rank)
    whole[:, : c.nope_dim], whole[:, c.nope_dim :] = keys.transpose(1, 2), values
    return whole.flatten(0, 1)


def _gguf_experts(read: Fields, values: Mapping[str, Any], tensors: Collection[str], scoring: int) -> MoEConfig:
    dense = read.integer("leading_dense_block_count", default=0)
    return gguf_routed_experts(read, tuple(range(dense, values["layers"])), tensors, scoring)


def _prepare_gguf(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the width of the heads in place of that of the cached vector, and without what `_read_gguf` reads."""
    width = raw.get("attention.key_length_mla", raw.get("attention.key_length"))
    return {k: v for k, v in raw.items() if k != _GGUF_MSCALE} | {"attention.key_length": width}


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    """Latent attention; YaRN changes the scale of its products, as `mscale_all_dim` says."""
    rope, head_dim = values["rope"], values["head_dim"]
    rope_dim = read.integer("rope.dimension_count", least=2, most=head_dim)
    scale: float = head_dim**-0.5
    if rope.kind == "yarn":
        mscale = 10 * read.number(_GGUF_MSCALE, least=0)
        scale *= (0.1 * mscale * log(max(rope.factor, 1.0)) + 1) ** 2
        rope = replace(rope, attention_factor=1.0)
    latent = MLAConfig(
        q_rank=read.integer("attention.q_lora_rank", default=0),
        kv_rank=read.integer("attention.kv_lora_rank", least=1),
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=read.integer("attention.value_length_mla", "attention.value_length", least=1),
    )
    return {
        "latent": latent,
        "kv_heads": values["heads"],
        "rope": rope,
        "attention_scale": scale,
        "experts": _gguf_experts(read, values, tensors, GGUF_SIGMOID if kind in _SPARSE else GGUF_SOFTMAX)
        if read.integer("expert_count", default=0)
        else None,
        **(_dense_context(values, read.integer("attention.indexer.top_k", least=1)) if kind in _SPARSE else {}),
    }


DEEPSEEK = Family(
    kinds={
        "deepseek_v2": Kind(
            defaults={"max_position_embeddings": 2048, "n_shared_experts": 2, "q_lora_rank": 1536, **_HEADS}
        ),
        "deepseek_v3": Kind(defaults=_DEEPSEEK_V3),
        "glm4_moe_lite": Kind(defaults=_GLM4_MOE_LITE),
        "glm_moe_dsa": Kind(defaults=_GLM_MOE_DSA),
        "deepseek_v32": Kind(defaults={**_DEEPSEEK_V3, "max_position_embeddings": 163840}),
    },
    prediction=_prediction,
    unread=("self_attn.indexer.", "indexer."),
    gguf_kinds={"deepseek2": "deepseek_v3", "glm-dsa": "glm_moe_dsa", "deepseek32": "deepseek_v32"},
    gguf_names={
        **GGUF_EXPERTS,
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
    },
    gguf_joined={"self_attn.kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), _join_latent)},
    prepare_gguf=_prepare_gguf,
    read_gguf=_read_gguf,
    read_head_dim=_latent_head_dim,
    read_experts=_experts,
    read_further=_further,
)
_GLM_FLAGS = {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"}
_GLM4_MOE: Mapping[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
}  # fmt: skip


def _read_gguf_glm(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    return {
        "experts": _gguf_experts(read, values, tensors, GGUF_SIGMOID),
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


GLM = Family(
    prediction=_prediction,
    kinds={"glm4_moe": Kind(defaults=_GLM4_MOE)},
    gguf_kinds={"glm4moe": "glm4_moe"},
    gguf_names={**GGUF_EXPERTS, "post_attention_layernorm": "post_attention_norm"},
    read_gguf=_read_gguf_glm,
    read_experts=_experts,
    read_further=lambda read, kind, values: {name: read.flag(key, default=False) for name, key in _GLM_FLAGS.items()},
)
