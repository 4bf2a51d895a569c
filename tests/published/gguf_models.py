"""GGUF files of small random models of transformers, as llama.cpp's converter makes them.

Names come from the `gguf` package's map of tensor names; the metadata and the changes of numbers are those of the
converter (ggml-org/llama.cpp, conversion/).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

Named = Iterator[tuple[str, torch.Tensor]]
Meta = dict[str, Any]
SIZES: Mapping[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip
F, S, L, C = "full_attention", "sliding_attention", "linear_attention", "conv"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def _same(name: str, tensor: torch.Tensor, config: Any) -> Named:
    yield name, tensor


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> Named:
    """Rotary pairs side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads:
        tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _split(name: str, tensor: torch.Tensor, gate: str, up: str) -> Named:
    yield from zip((gate, up), tensor.chunk(2, -2), strict=True)


def _lfm2(name: str, tensor: torch.Tensor, config: Any) -> Named:
    yield name, tensor.squeeze(1) if "conv.conv" in name else tensor


_GRANITE_NAMES = (
    ("router.weight", "router.layer.weight"),
    ("experts.gate_up_proj", "input_linear.weight"),
    ("experts.down_proj", "output_linear.weight"),
)
"""Names in a loaded model, and in its checkpoint."""


def _granite(name: str, tensor: torch.Tensor, config: Any) -> Named:
    """Granite 3 and 4: experts and shared networks apart, the layers of Mamba-2 as ggml wants them."""
    for loaded, saved in _GRANITE_NAMES:
        name = name.replace(f"block_sparse_moe.{loaded}", f"block_sparse_moe.{saved}")
    at = name.split(".mamba.")[0].split(".block_sparse")[0].split(".shared_mlp")[0].replace("model.layers.", "blk.")
    end = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if name.endswith("block_sparse_moe.input_linear.weight"):
        yield from _split(name, tensor, f"{at}.ffn_gate_exps.weight", f"{at}.ffn_up_exps.weight")
    elif name.endswith("shared_mlp.input_linear.weight"):
        yield from _split(name, tensor, f"{at}.ffn_gate{end}.weight", f"{at}.ffn_up{end}.weight")
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{at}.ffn_down{end}.weight", tensor
    elif name.endswith((".A_log", ".D")):
        yield name, (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
    elif name.endswith("mamba.norm.weight"):
        yield name, tensor.reshape(config.mamba_n_groups, -1)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif "conv1d.weight" in name:
        yield name, tensor.squeeze(1)
    else:
        yield from _permuted(name, tensor, config)


def _experts(name: str, tensor: torch.Tensor) -> Named:
    at = name.split(".mlp.")[0].replace("model.layers.", "blk.")
    if name.endswith("experts.gate_up_proj"):
        yield from _split(name, tensor, f"{at}.ffn_gate_exps.weight", f"{at}.ffn_up_exps.weight")
    elif name.endswith("experts.down_proj"):
        yield f"{at}.ffn_down_exps.weight", tensor
    else:
        yield name, tensor


def _qwen_hybrid(name: str, tensor: torch.Tensor, config: Any) -> Named:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif "conv1d" in name:
        tensor = tensor.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    yield from _experts(name, tensor)


def _qwen3_next(name: str, tensor: torch.Tensor, config: Any) -> Named:
    if not name.endswith("in_proj_qkvz.weight"):
        yield from _qwen_hybrid(name, tensor, config)
        return
    keys = config.linear_num_key_heads
    shared = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = torch.split(tensor.view(keys, -1, tensor.shape[1]), [config.linear_key_head_dim] * 2 + [shared] * 2, 1)
    q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
    at = name.split(".linear_attn.")[0].replace("model.layers.", "blk.")
    yield f"{at}.attn_qkv.weight", torch.cat([q, k, v])
    yield f"{at}.attn_gate.weight", z


def _qwen35(name: str, tensor: torch.Tensor, config: Any) -> Named:
    """Value heads of a key head apart."""
    keys, values, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def apart(part: torch.Tensor, size: int) -> torch.Tensor:
        return part.reshape(keys, values // keys, size, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    first = 2 * keys * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        tensor = torch.cat([tensor[:first], apart(tensor[first:], width)])
    elif "in_proj_z" in name:
        tensor = apart(tensor, width)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = apart(tensor, 1)
    elif "linear_attn.out_proj" in name:
        tensor = apart(tensor.T, width).T
    yield from _qwen_hybrid(name, tensor, config)


def _gemma4(name: str, tensor: torch.Tensor, config: Any) -> Named:
    at = name.split(".router.")[0].split(".experts.")[0].replace("model.layers.", "blk.")
    if name.endswith("router.scale"):
        yield f"{at}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"{at}.ffn_down_exps.scale", tensor
    elif ".experts." in name or name.endswith("layer_scalar"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _glm4(name: str, tensor: torch.Tensor, config: Any) -> Named:
    yield from _experts(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)


def _deepseek(name: str, tensor: torch.Tensor, config: Any) -> Named:
    """Keys and values expanded apart."""
    if name.endswith("kv_b_proj.weight"):
        at = name.split(".self_attn.")[0].replace("model.layers.", "blk.")
        whole = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = torch.split(whole, [config.qk_nope_head_dim, config.v_head_dim], 1)
        yield f"{at}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"{at}.attn_v_b.weight", values
    else:
        yield from _glm4(name, tensor, config)


def _deepseek_meta(config: Any) -> Meta:
    """Of files with keys and values apart."""
    sigmoid, rope = config.model_type != "deepseek_v2", config.rope_parameters
    meta: Meta = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank, "attention.value_length_mla": config.v_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim, "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor), "expert_weights_norm": sigmoid,
        "expert_gating_func": 2 if sigmoid else 1,
    }  # fmt: skip
    if sigmoid:
        meta |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if hasattr(config, "index_topk"):
        meta |= {
            "attention.indexer.head_count": config.index_n_heads, "attention.indexer.top_k": config.index_topk,
            "attention.indexer.key_length": config.index_head_dim,
        }  # fmt: skip
    if config.q_lora_rank:
        meta["attention.q_lora_rank"] = config.q_lora_rank
    if rope["rope_type"] == "yarn":
        meta |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }  # fmt: skip
    return meta


def _whole_latent_meta(config: Any) -> Meta:
    """Of files with keys and values together."""
    meta = {k: v for k, v in _deepseek_meta(config).items() if not k.endswith("_mla")}
    return meta | {
        "attention.head_count_kv": config.num_attention_heads, "attention.value_length": config.v_head_dim,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
    }  # fmt: skip


def _state_heads(config: Any) -> list[int]:
    return [0 if kind in (L, C, "mamba") else config.num_key_value_heads for kind in config.layer_types]


def _lfm2_meta(config: Any) -> Meta:
    return {"attention.head_count_kv": _state_heads(config), "shortconv.l_cache": config.conv_L_cache}


def _granite_meta(config: Any) -> Meta:
    return {
        "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
    }  # fmt: skip


def _granitemoe_meta(config: Any) -> Meta:
    return _granite_meta(config) | {
        "expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", 0),
    }  # fmt: skip


def _granitehybrid_meta(config: Any) -> Meta:
    experts = _granitemoe_meta(config) if config.num_local_experts else _granite_meta(config)
    return experts | {
        "attention.head_count_kv": _state_heads(config), "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state, "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size, "ssm.time_step_rank": config.mamba_n_heads,
        "rope.scaling.finetuned": False,
        **({} if config.num_local_experts else {"feed_forward_length": config.shared_intermediate_size}),
    }  # fmt: skip


def _delta_meta(config: Any) -> Meta:
    meta = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads, "full_attention_interval": 2,
        "rope.dimension_sections": [1, 1, 0, 0], "rope.dimension_count": config.head_dim // 4,
    }  # fmt: skip
    if getattr(config, "num_experts", 0):
        meta |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size, "feed_forward_length": None,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    return meta


def _gemma4_meta(config: Any) -> Meta:
    local, layers, shared = [t == S for t in config.layer_types], config.num_hidden_layers, config.num_kv_shared_layers
    meta: Meta = {
        "attention.shared_kv_layers": shared, "attention.sliding_window": config.sliding_window,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window_pattern": local, "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0,
        "attention.key_length": _GEMMA4_FULL, "attention.value_length": _GEMMA4_FULL,
        "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "rope.dimension_count": _GEMMA4_FULL, "rope.dimension_count_swa": 16,
    }  # fmt: skip
    if config.use_double_wide_mlp:
        meta["feed_forward_length"] = [config.intermediate_size * (1 + (i >= layers - shared)) for i in range(layers)]
    if config.attention_k_eq_v:  # one key-value head with full attention
        meta["attention.head_count_kv"] = [2 if own else 1 for own in local]
    if config.enable_moe_block:
        meta |= {
            "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    if config.final_logit_softcapping:
        meta["final_logit_softcapping"] = config.final_logit_softcapping
    return meta


def _plus_one(name: str, tensor: torch.Tensor, config: Any) -> Named:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _gemma2_meta(config: Any) -> Meta:
    return {
        "attention.sliding_window": config.sliding_window, "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }  # fmt: skip


def _gemma3_meta(config: Any) -> Meta:
    return {
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": config.rope_parameters[F]["rope_theta"],
    }


def _mistral3_meta(config: Any) -> Meta:
    rope = config.rope_parameters
    return {
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }  # fmt: skip


def _longrope_meta(config: Any) -> Meta:
    factor = config.max_position_embeddings / config.original_max_position_embeddings
    return {
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "rope.dimension_count": 12,
        "rope.scaling.attn_factor": float(
            np.sqrt(1 + np.log(factor) / np.log(config.original_max_position_embeddings))
        ),
    }


def _glm4_meta(config: Any) -> Meta:
    return {
        "rope.dimension_count": config.head_dim // 2, "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok, "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": config.first_k_dense_replace,
    }  # fmt: skip


def _lfm2_moe(name: str, tensor: torch.Tensor, config: Any) -> Named:
    at = name.split(".feed_forward.")[0].replace("model.layers.", "blk.")
    if name.endswith("experts.gate_up_proj"):
        yield from _split(name, tensor, f"{at}.ffn_gate_exps.weight", f"{at}.ffn_up_exps.weight")
    elif name.endswith("experts.down_proj"):
        yield f"{at}.ffn_down_exps.weight", tensor
    elif name.endswith("expert_bias"):
        yield f"{at}.exp_probs_b.bias", tensor
    else:
        yield from _lfm2(name, tensor, config)


def _lfm2_moe_meta(config: Any) -> Meta:
    return _lfm2_meta(config) | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok, "expert_gating_func": 2,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
    }  # fmt: skip


def _llama4(name: str, tensor: torch.Tensor, config: Any) -> Named:
    at = name.split(".feed_forward.")[0].replace("model.layers.", "blk.")
    if name.endswith("experts.gate_up_proj"):
        yield from _split(name, tensor.mT.contiguous(), f"{at}.ffn_gate_exps.weight", f"{at}.ffn_up_exps.weight")
    elif name.endswith("experts.down_proj"):
        yield f"{at}.ffn_down_exps.weight", tensor.mT
    else:
        yield name, tensor


def _llama4_meta(config: Any) -> Meta:
    return {
        "feed_forward_length": config.intermediate_size_mlp, "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok, "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": 2, "rope.dimension_count": config.head_dim,
    }  # fmt: skip


def _nemotron_h(name: str, tensor: torch.Tensor, config: Any) -> Named:
    at = name.split(".mixer.")[0].replace("model.layers.", "blk.")
    if ".experts." in name:
        yield f"{at}.ffn_{'up' if 'up_proj' in name else 'down'}_exps.weight", tensor
        return
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    elif name.endswith(("A_log", ".D")):
        tensor = (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt.bias")
    elif "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    elif name.endswith("mixer.norm.weight"):
        tensor = tensor.reshape(config.n_groups, -1)
    yield name.replace("model.", "backbone.").replace("embed_tokens", "embeddings"), tensor


def _nemotron_h_meta(config: Any) -> Meta:
    types = config.layers_block_type
    sparse = "moe" in types
    width = config.moe_intermediate_size if sparse else config.intermediate_size
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (t in ("attention", F)) for t in types],
        "feed_forward_length": [width * (t in ("mlp", "moe")) for t in types], "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size, "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads, "rope.scaling.finetuned": False,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        **({
            "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": width, "expert_shared_count": config.n_shared_experts,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_weights_norm": config.norm_topk_prob, "expert_group_count": config.n_group,
            "expert_weights_scale": float(config.routed_scaling_factor),
        } if sparse else {}),
    }  # fmt: skip


def _minicpm3_meta(config: Any) -> Meta:
    rotary = config.qk_rope_head_dim
    return {
        "attention.q_lora_rank": config.q_lora_rank, "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + rotary, "rope.dimension_count": rotary,
        "attention.head_count_kv": config.num_key_value_heads, "attention.value_length": None,
    }  # fmt: skip


def _window_meta(config: Any) -> Meta:
    """Of models with windows in some layers: OLMo 3, EXAONE 4."""
    if not getattr(config, "sliding_window", None):
        return {}
    rope = getattr(config, "rope_parameters", None) or {}
    yarn = rope.get(F, {})
    scaling = {
        "rope.freq_base": yarn["rope_theta"], "rope.scaling.type": "yarn", "rope.scaling.factor": yarn["factor"],
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
    } if yarn.get("rope_type") == "yarn" else {}  # fmt: skip
    return scaling | {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [t == S for t in config.layer_types],
    }


def _hunyuan_meta(config: Any) -> Meta:
    """A fixed alpha stretches the base of the positions."""
    rope = config.rope_parameters
    base = rope["rope_theta"] * rope.get("alpha", 1.0) ** (config.head_dim / (config.head_dim - 2))
    return {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def _cohere2_meta(config: Any) -> Meta:
    return {
        "logit_scale": config.logit_scale, "attention.sliding_window": config.sliding_window,
        "attention.layer_norm_epsilon": config.layer_norm_eps, "rope.scaling.type": "none",
        "rope.dimension_count": config.head_dim,
    }  # fmt: skip


@dataclass(frozen=True)
class GGUFCase:
    """A model of transformers and how the converter writes it."""

    architecture: str
    config: str
    values: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[str, torch.Tensor, Any], Named] = _same
    meta: Callable[[Any], Meta] = lambda config: {}


_DELTA = {
    "layer_types": [L, F, L], "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_SPARSE = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
_SCALES = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.8, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
}  # fmt: skip
_MAMBA = _SCALES | {
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 8, "mamba_d_conv": 4, "shared_intermediate_size": 32, "position_embedding_type": "nope",
}  # fmt: skip
_MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_key_value_heads": 4, "num_mtp_layers": 0,
}  # fmt: skip
_LONG = {
    "max_position_embeddings": 512, "original_max_position_embeddings": 256, "sliding_window": None,
    "partial_rotary_factor": 0.75,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 256},
}  # fmt: skip
_WINDOWS = {"sliding_window": 8, "layer_types": [S, S, S, F, S], "num_hidden_layers": 5}
_NEMOTRON = {
    "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
}  # fmt: skip
_MINICPM = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA4_FULL = 32
"""Width of heads with full attention."""
_GEMMA4 = {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": _GEMMA4_FULL, "sliding_window": 8,
    "layer_types": [S, F, S, F, S, F], "vocab_size_per_layer_input": 61,
}  # fmt: skip
CASES: Mapping[str, GGUFCase] = {
    "qwen2": GGUFCase("qwen2", "Qwen2Config"),
    "qwen3": GGUFCase("qwen3", "Qwen3Config", {"head_dim": 32}),
    "gemma2": GGUFCase("gemma2", "Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    _plus_one, _gemma2_meta),
    "gemma3": GGUFCase("gemma3", "Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8,
    "num_hidden_layers": 7}, _plus_one, _gemma3_meta),
    "gemma3 marked layers": GGUFCase("gemma3", "Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16,
    "sliding_window": 8, "layer_types": [S, F, S]}, _plus_one, lambda config: _gemma3_meta(config) | {
    "attention.sliding_window_pattern": [t == S for t in config.layer_types]}),
    "gemma4 E2B": GGUFCase("gemma4", "Gemma4TextConfig", _GEMMA4 | {"hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True}, _gemma4, _gemma4_meta),
    "gemma4": GGUFCase("gemma4", "Gemma4TextConfig", _GEMMA4 | {"hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0}, _gemma4, _gemma4_meta),
    "gemma4 experts": GGUFCase("gemma4", "Gemma4TextConfig", _GEMMA4 | {"hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}, _gemma4,
    _gemma4_meta),
    "lfm2": GGUFCase("lfm2", "Lfm2Config", {"layer_types": [C, F, C], "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True}, _lfm2, _lfm2_meta),
    "granite": GGUFCase("granite", "GraniteConfig", _SCALES, _granite, _granite_meta),
    "granite code": GGUFCase("llama", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}, _permuted),
    "granitemoe": GGUFCase("granitemoe", "GraniteMoeConfig", _SCALES | {"num_local_experts": 5}, _granite,
    _granitemoe_meta),
    "granitemoe shared": GGUFCase("granitemoe", "GraniteMoeSharedConfig", _SCALES | {"num_local_experts": 5,
    "shared_intermediate_size": 32}, _granite, _granitemoe_meta),
    "granitehybrid": GGUFCase("granitehybrid", "GraniteMoeHybridConfig", _MAMBA | {"num_local_experts": 0,
    "num_experts_per_tok": 0}, _granite, _granitehybrid_meta),
    "granitehybrid experts": GGUFCase("granitehybrid", "GraniteMoeHybridConfig", _MAMBA | {"num_local_experts": 5},
    _granite, _granitehybrid_meta),
    "qwen3next": GGUFCase("qwen3next", "Qwen3NextConfig", _DELTA | _SPARSE, _qwen3_next, _delta_meta),
    "qwen35": GGUFCase("qwen35", "Qwen3_5TextConfig", _DELTA, _qwen35, _delta_meta),
    "qwen35 equal heads": GGUFCase("qwen35", "Qwen3_5TextConfig", _DELTA | {"linear_num_value_heads": 2}, _qwen35,
    _delta_meta),
    "qwen35moe": GGUFCase("qwen35moe", "Qwen3_5MoeTextConfig", _DELTA | _SPARSE, _qwen35, _delta_meta),
    "mistral3": GGUFCase("mistral3", "Ministral3Config", {"head_dim": 16, "rope_parameters": YARN | {"mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}, _permuted, _mistral3_meta),
    "smollm3": GGUFCase("smollm3", "SmolLM3Config", {"num_hidden_layers": 5}, _permuted),
    "deepseek2 V3": GGUFCase("deepseek2", "DeepseekV3Config", _MLA | {"n_group": 2, "topk_group": 1,
    "n_routed_experts": 8, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, _deepseek,
    _deepseek_meta),
    "deepseek2 V2 Lite": GGUFCase("deepseek2", "DeepseekV2Config", _MLA | {"q_lora_rank": None, "topk_method": "greedy",
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}, _deepseek, _deepseek_meta),
    "deepseek2 whole": GGUFCase("deepseek2", "DeepseekV3Config", _MLA | {"n_group": 1, "topk_group": 1}, _glm4,
    _whole_latent_meta),
    "glm-dsa": GGUFCase("glm-dsa", "GlmMoeDsaConfig", {k: v for k, v in _MLA.items() if k != "num_mtp_layers"} | {
    "index_topk": 32, "index_n_heads": 2, "index_head_dim": 32, "indexer_types": ["full", "shared", "full"]}, _deepseek,
    _deepseek_meta),
    "deepseek32": GGUFCase("deepseek32", "DeepseekV32Config", {k: v for k, v in _MLA.items() if k[:7] != "num_mtp"} | {
    "index_topk": 32, "index_n_heads": 2, "index_head_dim": 32, "n_group": 2, "topk_group": 1, "n_routed_experts": 8,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, _deepseek, _deepseek_meta),
    "phi3": GGUFCase("phi3", "Phi3Config", {"sliding_window": None}),
    "phi3 longrope": GGUFCase("phi3", "Phi3Config", _LONG, _same, _longrope_meta),
    "seed_oss": GGUFCase("seed_oss", "SeedOssConfig", {"head_dim": 16}),
    "glm4moe": GGUFCase("glm4moe", "Glm4MoeConfig", {"head_dim": 16, "use_qk_norm": True, "attention_bias": True,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_mtp_layers": 0, "routed_scaling_factor": 1.5}, _glm4, _glm4_meta),
    "lfm2moe": GGUFCase("lfm2moe", "Lfm2MoeConfig", {"layer_types": [C, F, C], "num_experts": 5, "num_dense_layers": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True}, _lfm2_moe, _lfm2_moe_meta),
    "llama4": GGUFCase("llama4", "Llama4TextConfig", {"head_dim": 16, "intermediate_size_mlp": 64,
    "intermediate_size": 32, "num_local_experts": 5, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "num_hidden_layers": 5}, _llama4, _llama4_meta),
    "nemotron_h": GGUFCase("nemotron_h", "NemotronHConfig", _NEMOTRON | {"layers_block_type": ["mamba", "mlp",
    "attention", "mlp"]}, _nemotron_h, _nemotron_h_meta),
    "nemotron_h_moe": GGUFCase("nemotron_h_moe", "NemotronHConfig", _NEMOTRON | {"layers_block_type": ["mamba", "moe",
    "attention", "moe"], "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5}, _nemotron_h, _nemotron_h_meta),
    "glm4": GGUFCase("glm4", "Glm4Config", {"head_dim": 32}, meta=lambda config: {"rope.dimension_count": 16}),
    "ernie4_5": GGUFCase("ernie4_5", "Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5 biases": GGUFCase("ernie4_5", "Ernie4_5Config", {"head_dim": 16, "use_bias": True,
    "tie_word_embeddings": False}),
    "minicpm3": GGUFCase("minicpm3", "MiniCPM3Config", _MINICPM, meta=_minicpm3_meta),
    "minicpm3 longrope": GGUFCase("minicpm3", "MiniCPM3Config", _MINICPM | {"max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "longrope",
    "rope_theta": 10000.0, "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 256}}, meta=_minicpm3_meta),
    "olmo2": GGUFCase("olmo2", "Olmo2Config"),
    "olmo3": GGUFCase("olmo2", "Olmo3Config", _WINDOWS | {"rope_parameters": {F: YARN, S: {"rope_type": "default",
    "rope_theta": 10000.0}}}, meta=_window_meta),
    "exaone4": GGUFCase("exaone4", "Exaone4Config", {"sliding_window": None, "layer_types": [F] * 3}),
    "exaone4 windows": GGUFCase("exaone4", "Exaone4Config", _WINDOWS, meta=_window_meta),
    "hunyuan-dense": GGUFCase("hunyuan-dense", "HunYuanDenseV1Config", {"head_dim": 32}),
    "hunyuan-dense alpha": GGUFCase("hunyuan-dense", "HunYuanDenseV1Config", {"head_dim": 16, "rope_parameters": {
    "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}}, meta=_hunyuan_meta),
    "command-r": GGUFCase("command-r", "CohereConfig", {"logit_scale": 0.25}, meta=lambda config: {
    "logit_scale": config.logit_scale, "attention.layer_norm_epsilon": config.layer_norm_eps}),
    "cohere2": GGUFCase("cohere2", "Cohere2Config", {"sliding_window": 8, "num_hidden_layers": 5,
    "logit_scale": 0.25}, meta=_cohere2_meta),
}  # fmt: skip


_BUFFERS = ("layer_scalar", "e_score_correction_bias", "expert_bias")


def oracle_of(case: GGUFCase) -> Any:
    """A random model whose every vector differs from its initial value."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**SIZES, **case.values})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Nemotron-H of transformers has another lower limit for prompts, which it does not have for single tokens.
            module.time_step_limit = config.time_step_limit
    with torch.no_grad():
        buffers = (b for n, b in model.named_buffers() if n.endswith(_BUFFERS))
        for vector in [p for p in model.parameters() if p.dim() == 1] + list(buffers):
            vector.add_(0.2 * torch.randn_like(vector))
        for name, parameter in model.named_parameters():
            if case.architecture == "gemma4" and name.endswith("q_norm.weight"):
                parameter.mul_(0.3)
    return model


def _nextn(name: str) -> str:
    """The name in GGUF of a part of a layer of multi-token prediction, which the package does not know of every
    architecture.
    """
    match = re.fullmatch(r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight", name)
    assert match is not None, f"{name} has no name in GGUF"
    return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"


def write_model(
    path: Path, case: GGUFCase, model: Any, kind: Kind = Kind.F32, prediction: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the file, its matrices stored as `kind`, which those of the model become, too; `prediction`: the tensors of
    layers of multi-token prediction by their names in DeepSeek-V3.
    """
    config, arch = model.config, case.architecture
    writer = gguf.GGUFWriter(path, arch)
    rope, blocks = getattr(config, "rope_parameters", None) or {}, config.num_hidden_layers
    blocks += len({name.split(".")[2] for name in prediction or ()})
    head_dim = case.values.get("head_dim") or config.hidden_size // config.num_attention_heads
    meta: Meta = {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "block_count": blocks,
        "nextn_predict_layers": blocks - config.num_hidden_layers or None,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": case.values.get("num_key_value_heads", 2), "attention.key_length": head_dim,
        "attention.value_length": head_dim, "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "attention.layer_norm_rms_epsilon": next(
            (float(getattr(config, n)) for n in ("rms_norm_eps", "norm_eps") if hasattr(config, n)), None
        ),
    }  # fmt: skip
    write: Mapping[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in (meta | case.meta(config)).items():
        if value is not None:
            write[type(value)](f"{arch}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")  # llama.cpp then loads a file without a tokenizer
    if arch == "gemma4":
        half = _GEMMA4_FULL // 2
        rotated = int(half * rope[F]["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32))
    for name in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    named = {"deepseek32": "glm-dsa"}.get(arch, arch)  # of the same names; `gguf` does not know it yet
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == named), blocks)
    for name, tensor in {**model.state_dict(), **(prediction or {})}.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = kind if tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 and "conv" not in name else Kind.F32
        if stored != Kind.F32:
            rows = tensor.mT if arch == "llama4" and ".experts." in name else tensor  # as the file has them
            blocks = quantize(np.ascontiguousarray(rows.numpy()), stored)
            rows.copy_(torch.from_numpy(dequantize(blocks, stored).reshape(rows.shape)))
        for each, data in case.change(name, tensor, config):
            own = each if each.startswith("blk.") else names.get_name(each, (".weight", ".bias")) or _nextn(each)
            # Transposed keys are quantised along another axis than those of the model.
            form = Kind.F32 if own.endswith("attn_k_b.weight") else stored
            writer.add_tensor(own, quantize(np.ascontiguousarray(data.numpy()), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
