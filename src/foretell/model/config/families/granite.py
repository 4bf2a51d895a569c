"""Granite 3 and 4: multipliers, experts in one tensor per layer beside a shared network, Mamba-2 layers."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from foretell.model.config.families.base import (
    Family,
    Kind,
    Rows,
    gguf_experts,
    gguf_mamba_names,
    gguf_state_layers,
    largest_kv_heads,
    no_windows,
)
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.config.states import Mamba2Config, check_time_step, gguf_mamba2, layers_of_type
from foretell.utils.validation import Fields

_BOTH, _DOWN = "shared_mlp.input_linear", "shared_mlp.output_linear"
_LINEAR = "linear_attention"


def _halves(ffn: int) -> list[Rows]:
    """Gate and up, which are one matrix."""
    return [Rows(_BOTH, 2 * ffn, range(first, first + ffn)) for first in (0, ffn)]


def _shared_network(config: ModelConfig, layer: int) -> list[Rows]:
    assert config.experts is not None
    return _halves(config.experts.shared_ffn)


def _ffn(read: Fields, kind: str) -> int:
    if kind == "granitemoehybrid":
        return read.integer("shared_intermediate_size", default=1024, least=1)
    return read.integer("intermediate_size", default=0) or read.integer("moe_intermediate_size", least=1)


def _experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts, beside which the shared expert is the dense network of other models."""
    count = read.integer("num_local_experts") if kind != "granite" else 0
    if not count:
        return None
    shared = 0
    if kind != "granitemoe":
        shared = read.integer("shared_intermediate_size", default=1024 if kind == "granitemoehybrid" else 0)
    return MoEConfig(
        count=count,
        active=read.integer("num_experts_per_tok", least=1, most=count),
        ffn=read.integer("intermediate_size", least=1),
        shared_ffn=shared,
        layers=tuple(range(layers)),
    )


def _state(read: Fields, kind: str, layers: int) -> Mamba2Config | None:
    chosen = layers_of_type(read, layers, _LINEAR, [_LINEAR] * layers) if kind == "granitemoehybrid" else ()
    if not chosen:
        return None
    heads = read.integer("mamba_n_heads", default=128, least=1)
    groups = read.integer("mamba_n_groups", default=1, least=1)
    inner = read.integer("mamba_expand", default=2, least=1) * read.integer("hidden_size", least=1)
    automatic = read.raw.get("mamba_d_head", "auto") == "auto"
    head_dim = inner // heads if automatic else read.integer("mamba_d_head", least=1)
    if head_dim * heads != inner:
        raise read.wrong("mamba_n_heads", f"a number of heads of width {head_dim} that make {inner} channels", heads)
    if heads % groups:
        raise read.wrong("mamba_n_groups", f"a divisor of mamba_n_heads, {heads}", groups)
    check_time_step(read)
    return Mamba2Config(
        layers=chosen,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=read.integer("mamba_d_state", default=256, least=1),
        taps=read.integer("mamba_d_conv", default=4, least=1),
        conv_bias=read.flag("mamba_conv_bias", default=True),
        bias=read.flag("mamba_proj_bias", default=False),
    )


def _further(read: Fields, kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    unrotated = kind == "granitemoehybrid" and read.text("position_embedding_type", default="nope") != "rope"
    return {
        "mlp_bias": kind == "granite" and read.flag("mlp_bias", default=False),
        "attention_scale": read.positive("attention_multiplier", default=1.0),
        "embedding_scale": read.positive("embedding_multiplier", default=1.0),
        "residual_scale": read.positive("residual_multiplier", default=1.0),
        "logit_scale": 1 / read.positive("logits_scaling", default=1.0),
        "unrotated_layers": tuple(range(values["layers"])) if unrotated else (),
    }


def _gguf_both(config: ModelConfig, kind: str) -> list[Rows]:
    """Gate and up, which are two tensors in GGUF."""
    ffn, ending = (config.ffn, "") if config.experts is None else (config.experts.shared_ffn, "_shexp")
    return [Rows(f"ffn_{name}{ending}", ffn) for name in ("gate", "up")]


def _gguf_down(config: ModelConfig, kind: str) -> list[Rows]:
    return [Rows("ffn_down" if config.experts is None else "ffn_down_shexp", config.hidden)]


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    layers, experts = values["layers"], None
    if read.integer("expert_count", default=0):
        shared = read.integer("expert_shared_feed_forward_length", default=0)
        experts = replace(gguf_experts(read, layers), shared_ffn=shared)
    states = gguf_state_layers(read, layers) if kind == "granitemoehybrid" else ()
    rotated = read.flag("rope.scaling.finetuned", default=True)
    return {
        "experts": experts,
        "state": gguf_mamba2(read, states, tensors) if states else None,
        "attention_scale": read.number("attention.scale", default=0.0) or None,
        "embedding_scale": read.number("embedding_scale", default=0.0) or 1.0,
        "residual_scale": read.number("residual_scale", default=0.0) or 1.0,
        "logit_scale": 1 / (read.number("logit_scale", default=0.0) or 1.0),
        "unrotated_layers": () if rotated else tuple(range(layers)),
    }


_SPARSE = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
GRANITE = Family(
    kinds={
        "granite": Kind(defaults={"max_position_embeddings": 2048}, optional_bias=True),
        "granitemoe": Kind(defaults=_SPARSE, optional_bias=True),
        "granitemoeshared": Kind(defaults=_SPARSE, optional_bias=True),
        "granitemoehybrid": Kind(defaults=_SPARSE, optional_bias=True),
    },
    names={
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.shared_experts.down_proj": _DOWN,
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    },
    rows={
        "mlp.gate_up": lambda config, layer: (
            _halves(config.ffn_of(layer)) if config.architecture == "granitemoehybrid" else None
        ),
        "mlp.down": lambda config, layer: (
            [Rows(_DOWN, config.hidden)] if config.architecture == "granitemoehybrid" else None
        ),
        "experts.shared.gate_up": _shared_network,
    },
    expert_storage="stacked",
    gguf_kinds={"granite": "granite", "granitemoe": "granitemoe", "granitehybrid": "granitemoehybrid"},
    gguf_names={
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        **gguf_mamba_names("mamba"),
    },
    gguf_interleaved=True,
    gguf_rows={_BOTH: _gguf_both, _DOWN: _gguf_down},
    gguf_vectors={"mamba.A_log": lambda stored, config, kind: (-stored).log()},
    prepare_gguf=largest_kv_heads,
    read_gguf=_read_gguf,
    read_ffn=_ffn,
    read_windows=no_windows,
    read_experts=_experts,
    read_state=_state,
    read_further=_further,
)
