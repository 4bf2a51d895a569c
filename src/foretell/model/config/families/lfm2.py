"""LFM2 (arXiv 2511.23404): short convolutions in most layers, experts in the later ones of its mixtures."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foretell.model.config.families.base import (
    GGUF_SIGMOID,
    Family,
    Kind,
    gguf_routed_experts,
    gguf_state_layers,
    largest_kv_heads,
    no_windows,
)
from foretell.model.config.model import MoEConfig
from foretell.model.config.states import ShortConvConfig, layers_of_type
from foretell.utils.validation import Fields


def _ffn(read: Fields, kind: str) -> int:
    width = read.integer("block_ff_dim", "intermediate_size", least=1)
    if not read.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = read.integer("block_multiple_of", default=256, least=1)
    scaled = int(read.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-scaled // multiple) * multiple


def _state(read: Fields, kind: str, layers: int) -> ShortConvConfig:
    full = read.integers("full_attn_idxs") if read.has("full_attn_idxs") else tuple(range(layers))
    default = ["full_attention" if i in full else "conv" for i in range(layers)]
    return ShortConvConfig(
        layers=layers_of_type(read, layers, "conv", default),
        channels=read.integer("hidden_size", least=1),
        taps=read.integer("conv_L_cache", default=3, least=1),
        bias=read.flag("conv_bias", default=False),
    )


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    if kind == "lfm2":
        return None
    count = read.integer("num_experts", least=1)
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("moe_intermediate_size", least=1),
        renormalize=read.flag("norm_topk_prob", default=True),
        layers=tuple(range(read.integer("num_dense_layers", default=2), layers)),
        scoring="sigmoid",
        selection_bias=read.flag("use_expert_bias", default=True),
        scale=read.number("routed_scaling_factor", default=1.0),
    )


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    experts = None
    if kind == "lfm2_moe":
        chosen = tuple(range(read.integer("leading_dense_block_count", default=0), values["layers"]))
        experts = replace(gguf_routed_experts(read, chosen, tensors, GGUF_SIGMOID), renormalize=True)
    state = ShortConvConfig(
        layers=gguf_state_layers(read, values["layers"]),
        channels=values["hidden"],
        taps=read.integer("shortconv.l_cache", least=1),
        bias="blk.0.shortconv.conv.bias" in tensors,
    )
    return {"state": state, "experts": experts}


_LFM2: Mapping[str, Any] = {
    "max_position_embeddings": 128000, "num_key_value_heads": 8, "rope_theta": 1e6, "eos_token_id": 2,
    "norm_eps": 1e-5,
}  # fmt: skip
_LFM2_MOE: Mapping[str, Any] = {
    **_LFM2, "block_auto_adjust_ff_dim": False, "num_experts_per_tok": 4, "num_experts": 32,
    "moe_intermediate_size": 1792,
}  # fmt: skip
LFM2 = Family(
    kinds={
        "lfm2": Kind(
            settings={"qk_norm": True, "tied": True},
            defaults=_LFM2,
        ),
        "lfm2_moe": Kind(
            settings={"qk_norm": True, "tied": True},
            defaults=_LFM2_MOE,
        ),
    },
    names={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.gate": "feed_forward.gate",
        "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
        "mlp.experts": "feed_forward.experts",
        "mlp.experts.{}.gate_proj": "feed_forward.experts.{}.w1",
        "mlp.experts.{}.up_proj": "feed_forward.experts.{}.w3",
        "mlp.experts.{}.down_proj": "feed_forward.experts.{}.w2",
    },
    final_norm="model.embedding_norm",
    gguf_kinds={"lfm2": "lfm2", "lfm2moe": "lfm2_moe"},
    gguf_names={
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
        "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.expert_bias": "exp_probs_b.bias",
        "feed_forward.experts.{}.w1": "ffn_gate_exps",
        "feed_forward.experts.{}.w3": "ffn_up_exps",
        "feed_forward.experts.{}.w2": "ffn_down_exps",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "model.embedding_norm": "token_embd_norm",
    },
    prepare_gguf=largest_kv_heads,
    read_gguf=_read_gguf,
    read_ffn=_ffn,
    read_windows=no_windows,
    read_experts=_experts,
    read_state=_state,
    read_further=lambda read, kind, values: {"tied": read.flag("tie_embedding", "tie_word_embeddings", default=True)},
)
