"""The supported architectures: what their `config.json` leaves out, and what distinguishes groups of them."""

from collections.abc import Mapping
from typing import Any

from foretell.model.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT
from foretell.model.config.readers.compressed import COMPRESSED

_GEMMA4: Mapping[str, Any] = {
    "post_norms": True, "qk_norm": True, "value_norm": True, "activation": "gelu_tanh", "layer_scales": True,
    "tied": True,
}  # fmt: skip
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": {"norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh", "tied": True},
    "gemma3_text": {"norm_offset": 1.0, "post_norms": True, "qk_norm": True, "activation": "gelu_tanh", "tied": True},
    "mixtral": {},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {"qk_norm": True},
    "qwen3_next": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "qwen3_5_text": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "qwen3_5_moe_text": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "lfm2": {"qk_norm": True, "tied": True},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoehybrid": {},
    "nemotron_h": {"gated": False},
    "smollm3": {"tied": True},
    "gpt_oss": {"sinks": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "llama4_text": {},
    "ministral3": {},
}
"""Supported values of `model_type`, and the settings that their `config.json` does not contain."""

_QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: Mapping[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
_LATENT_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN_HYBRID: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "hidden_act": "silu",
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {
        **_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "mixtral": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_experts": 8,
    },
    "qwen2_moe": {
        **_QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        **_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "qwen3_next": {
        **_QWEN_HYBRID, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    },
    "qwen3_5_text": {**_QWEN_HYBRID, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        **_QWEN_HYBRID, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    },
    "granite": {"max_position_embeddings": 2048},
    "granitemoe": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoehybrid": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron_h": {
        "max_position_embeddings": 4096, "num_key_value_heads": 8, "layer_norm_epsilon": 1e-5,
        "num_experts_per_tok": 2, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    },
    "smollm3": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
    "lfm2": {"max_position_embeddings": 128000, "num_key_value_heads": 8, "rope_theta": 1e6, "eos_token_id": 2},
    "gpt_oss": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0, "num_experts_per_tok": 4, "num_local_experts": 128, "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
        "attention_bias": True, "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT,
    },
    "deepseek_v2": {"max_position_embeddings": 2048, "n_shared_experts": 2, "q_lora_rank": 1536, **_LATENT_HEADS},
    "deepseek_v3": {
        "max_position_embeddings": 4096, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "q_lora_rank": 1536, **_LATENT_HEADS,
    },
    "glm4_moe": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "q_lora_rank": 768,
        **_LATENT_HEADS, "qk_nope_head_dim": 192, "v_head_dim": 256,
    },
    "gemma4_text": {"max_position_embeddings": 131072, "bos_token_id": 2, "eos_token_id": 1},
    "gemma4_unified_text": {
        "max_position_embeddings": 262144, "bos_token_id": 2, "eos_token_id": 1, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "llama4_text": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    "ministral3": {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
"""The defaults of transformers for keys missing in `config.json`, by `model_type`, where they differ from ours.

Published Gemma files omit even sizes. For other types sizes are required, so that a damaged file is recognised.
"""

LATENT_KINDS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Architectures with latent attention."""
TEXT_MODELS = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "llama4": "llama4_text",
    "mistral3": "mistral", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""The language models of multimodal values of `model_type`; vision parts are not read."""
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` with gated attention beside gated DeltaNet layers."""
GRANITE = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
GRANITE_EXPERTS = GRANITE[1:]
"""Values of `model_type` with multipliers."""
OPTIONAL_BIAS = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "smollm3", *GATED, *GRANITE)
"""Values of `model_type` whose attention has biases on request."""
UNWINDOWED = ("llama", "lfm2", "nemotron_h", *GATED, *GRANITE)
SHARED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
MAX_LAYERS = 10_000
MAX_CONTEXT = 2**24
"""Tokens; the longest context of a published model is 10 million."""


def is_decoder_family(raw: Mapping[str, Any]) -> bool:
    """Whether `from_hf` handles a `config.json`: its `model_type` is supported, or missing (then `from_hf` raises)."""
    kind, text = raw.get("model_type"), raw.get("text_config")
    if kind == "mistral3" and isinstance(text, Mapping):
        kind = text.get("model_type") or kind
    return not isinstance(kind, str) or kind in TEXT_MODELS or kind in ARCHITECTURES or kind == COMPRESSED
