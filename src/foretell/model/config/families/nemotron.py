"""Nemotron-H and Nemotron 3 (arXiv 2504.03624): layers of one sub-layer each, all of the same names."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foretell.model.config.families.base import (
    GGUF_SIGMOID,
    Family,
    Kind,
    gguf_mamba_names,
    gguf_routed_experts,
    largest_kv_heads,
    no_windows,
)
from foretell.model.config.model import MoEConfig
from foretell.model.config.readers.values import read_head_dim
from foretell.model.config.states import LAYER_TYPES, Mamba2Config, check_time_step, gguf_mamba2
from foretell.utils.validation import Fields

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""


def _with_layer_types(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The configuration with its `layer_types` and their number."""
    read = Fields(raw, source)
    named = read.texts("layers_block_type") or read.texts("layer_types")
    if not named and read.has("hybrid_override_pattern"):
        named = tuple(_PATTERN.get(letter, letter) for letter in read.text("hybrid_override_pattern"))
    types = [LAYER_TYPES.get(kind, kind) for kind in named or _PATTERN.values()]
    unknown = [kind for kind in types if kind not in _PATTERN.values()]
    if unknown:
        raise read.wrong("hybrid_override_pattern", f"layers of {', '.join(_PATTERN)}", unknown[0])
    return {**raw, "layer_types": types, "layers_block_type": None, "num_hidden_layers": len(types)}


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts of Nemotron 3: DeepSeek-V3's with networks that are not gated."""
    chosen = tuple(i for i, each in enumerate(read.texts("layer_types")) if each == "moe")
    if not chosen:
        return None
    if read.has("moe_latent_size"):
        raise read.wrong("moe_latent_size", "null: experts of latent vectors are not supported", "a size")
    if read.flag("mlp_bias", default=False):
        raise read.wrong("mlp_bias", "false for a model with experts", True)
    if read.integer("n_shared_experts", default=1) != 1:
        raise read.wrong("n_shared_experts", "1 for nemotron_h", read.raw["n_shared_experts"])
    count = read.integer("n_routed_experts", least=1)
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("moe_intermediate_size", least=1),
        shared_ffn=read.integer("moe_shared_expert_intermediate_size", default=7688, least=1),
        renormalize=read.flag("norm_topk_prob", default=True),
        layers=chosen,
        scoring="sigmoid",
        selection_bias=True,
        groups=read.integer("n_group", default=1, least=1),
        active_groups=read.integer("topk_group", default=1, least=1),
        ranked_by=2,
        scale=read.number("routed_scaling_factor", default=1.0),
    )


def _state(read: Fields, kind: str, layers: int) -> Mamba2Config:
    chosen = tuple(i for i, each in enumerate(read.texts("layer_types")) if each == _PATTERN["M"])
    if not chosen:
        raise read.wrong("hybrid_override_pattern", "a pattern with Mamba-2 layers", "none")
    heads = read.integer("mamba_num_heads", default=128, least=1)
    groups = read.integer("n_groups", "mamba_n_groups", default=8, least=1)
    if heads % groups:
        raise read.wrong("n_groups", f"a divisor of mamba_num_heads, {heads}", groups)
    activation = read.text("mamba_hidden_act", default="silu")
    if activation != "silu":
        raise read.wrong("mamba_hidden_act", "silu", activation)
    check_time_step(read)
    return Mamba2Config(
        layers=chosen,
        heads=heads,
        head_dim=read.integer("mamba_head_dim", default=64, least=1),
        groups=groups,
        state_dim=read.integer("ssm_state_size", default=128, least=1),
        taps=read.integer("conv_kernel", "mamba_d_conv", default=4, least=1),
        conv_bias=read.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=read.flag("use_bias", default=False),
    )


def _further(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    activation = read.text("mlp_hidden_act", default="relu2")
    if activation != "relu2":
        raise read.wrong("mlp_hidden_act", "relu2: no other activation is supported for nemotron_h", activation)
    types = read.texts("layer_types")
    networks = tuple(i for i, each in enumerate(types) if each in ("mlp", "moe"))
    return {
        "activation": "relu2",
        "attention_free_layers": networks,
        "mlp_free_layers": tuple(i for i in range(len(types)) if i not in networks),
        "mlp_bias": read.flag("mlp_bias", default=False),
        "unrotated_layers": tuple(range(len(types))),
    }


def _prepare_gguf(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """With one width of the networks, which layers of another kind have as 0."""
    eps, raw = raw.get("attention.layer_norm_epsilon"), largest_kv_heads(raw)
    widths = raw.get("feed_forward_length")
    several = isinstance(widths, list) and all(isinstance(each, int) for each in widths)
    width = max(widths) if several else widths  # type: ignore[arg-type]
    return {"attention.layer_norm_rms_epsilon": eps, **raw, "feed_forward_length": width}


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    layers, chosen = values["layers"], list[tuple[int, ...]]()
    for name in ("feed_forward_length", "attention.head_count_kv"):
        numbers = read.integers(name)
        if len(numbers) != layers or len({each for each in numbers if each}) > 1:
            raise read.wrong(name, f"{layers} numbers, 0 or the same one", list(numbers))
        chosen.append(tuple(i for i, each in enumerate(numbers) if each))
    networks, states = chosen[0], tuple(i for i in range(layers) if not any(i in each for each in chosen))
    if not states:
        raise read.wrong("attention.head_count_kv", "layers of Mamba-2", "none")
    if read.integer("moe_latent_size", default=0):
        raise read.wrong("moe_latent_size", "0: experts of latent vectors are not supported", "a size")
    experts = None
    if read.integer("expert_count", default=0):
        experts = replace(gguf_routed_experts(read, networks, tensors, GGUF_SIGMOID), scoring="sigmoid", ranked_by=2)
    return {
        "experts": experts,
        "state": gguf_mamba2(read, states, tensors),
        "activation": "relu2",
        "attention_free_layers": networks,
        "mlp_free_layers": tuple(i for i in range(layers) if i not in networks),
        "unrotated_layers": tuple(range(layers)),
    }


_NEMOTRON_H: Mapping[str, Any] = {
    "max_position_embeddings": 4096, "num_key_value_heads": 8, "layer_norm_epsilon": 1e-5, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "moe_intermediate_size": 7688,
}  # fmt: skip
NEMOTRON = Family(
    kinds={
        "nemotron_h": Kind(
            settings={"gated": False},
            defaults=_NEMOTRON_H,
        )
    },
    names={
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        "self_attn": "mixer",
        "mamba": "mixer",
        "mlp": "mixer",
    },
    final_norm="model.norm_f",
    gguf_kinds={"nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h"},
    gguf_names={
        "norm": "attn_norm",
        **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
        "mixer.o_proj": "attn_output",
        **gguf_mamba_names("mixer"),
        "mixer.gate": "ffn_gate_inp",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        **{
            f"mixer.{part}{name}_proj": f"ffn_{name}{end}"
            for part, end in (("", ""), ("experts.{}.", "_exps"), ("shared_experts.", "_shexp"))
            for name in ("up", "down")
        },
    },
    gguf_vectors={"mixer.A_log": lambda stored, config, kind: (-stored).log()},
    prepare_gguf=_prepare_gguf,
    read_gguf=_read_gguf,
    prepare=_with_layer_types,
    read_head_dim=lambda read, default: read_head_dim(read, ("head_dim", "attention_head_dim"), 128),
    read_windows=no_windows,
    read_experts=_experts,
    read_state=_state,
    read_further=_further,
)
