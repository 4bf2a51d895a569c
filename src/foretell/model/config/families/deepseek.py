"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437) and GLM-4.5: experts in groups beside shared ones, and latent
attention in all but GLM-4.5.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import log
from typing import Any

from foretell.model.config.families.base import Family, Kind, PredictionNames, gguf_experts
from foretell.model.config.model import MLAConfig, MoEConfig
from foretell.model.config.rope import RopeConfig
from foretell.utils.validation import Fields

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
    types = read.texts("mlp_layer_types") if kind == "glm4_moe_lite" else ()
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
    return {"latent": latent, "kv_heads": values["heads"], "rope": rope, "attention_scale": scale}


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
        norms_states=False,
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
DEEPSEEK = Family(
    kinds={
        "deepseek_v2": Kind(
            defaults={"max_position_embeddings": 2048, "n_shared_experts": 2, "q_lora_rank": 1536, **_HEADS}
        ),
        "deepseek_v3": Kind(defaults=_DEEPSEEK_V3),
        "glm4_moe_lite": Kind(defaults=_GLM4_MOE_LITE),
    },
    prediction=_prediction,
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
    """GLM-4.5: sigmoid is what llama.cpp takes where the file does not say how experts are weighted."""
    layers, scoring = values["layers"], read.integer("expert_gating_func", default=_SIGMOID)
    groups = {name: read.integer(name, default=1) or 1 for name in ("expert_group_count", "expert_group_used_count")}
    for name, value, known in (("expert_gating_func", scoring, _SIGMOID), *((k, v, 1) for k, v in groups.items())):
        if value != known:
            raise read.wrong(name, f"{known} for {kind}", value)
    whole = gguf_experts(read, layers)
    experts = replace(
        whole,
        layers=tuple(range(read.integer("leading_dense_block_count", default=0), layers)),
        shared_ffn=read.integer("expert_shared_count", default=0) * whole.ffn,
        renormalize=read.flag("expert_weights_norm", default=True),
        scoring="sigmoid",
        selection_bias=True,
        ranked_by=2,
        scale=read.number("expert_weights_scale", default=1.0) or 1.0,
    )
    return {"experts": experts, "qk_norm": "blk.0.attn_q_norm.weight" in tensors}


_SIGMOID = 2
"""A `gguf.ExpertGatingFuncType`."""
GLM = Family(
    prediction=_prediction,
    kinds={"glm4_moe": Kind(defaults=_GLM4_MOE)},
    gguf_kinds={"glm4moe": "glm4_moe"},
    gguf_names={
        "post_attention_layernorm": "post_attention_norm",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
    read_gguf=_read_gguf_glm,
    read_experts=_experts,
    read_further=lambda read, kind, values: {name: read.flag(key, default=False) for name, key in _GLM_FLAGS.items()},
)
