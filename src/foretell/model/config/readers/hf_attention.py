"""The attention of a Hugging Face `config.json`: windows, rotary embeddings, latent attention."""

from collections.abc import Mapping
from dataclasses import replace
from math import log

from foretell.model.config.model import MLAConfig
from foretell.model.config.readers.architectures import GRANITE, LATENT_KINDS, UNWINDOWED
from foretell.model.config.readers.values import read_head_dim
from foretell.model.config.rope import RopeConfig, read_rope
from foretell.utils.validation import Fields

_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_attention_scale(read: Fields, kind: str) -> float | None:
    """Factor on query-key products; None: by the width of a head."""
    if kind in GRANITE:
        return read.positive("attention_multiplier", default=1.0)
    if kind.startswith("gemma") and read.has("query_pre_attn_scalar"):
        return float(read.positive("query_pre_attn_scalar") ** -0.5)
    return None


def read_unrotated_layers(read: Fields, kind: str, layers: int) -> tuple[int, ...]:
    """Layers without rotary positions."""
    nope = kind == "granitemoehybrid" and read.text("position_embedding_type", default="nope") != "rope"
    if nope or kind == "nemotron_h":
        return tuple(range(layers))
    if kind != "smollm3":
        return ()
    interval = read.integer("no_rope_layer_interval", default=4, least=1)
    rotated = read.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(layers))
    if len(rotated) != layers:
        raise read.wrong("no_rope_layers", f"{layers} of 0 (not rotated) or 1", list(rotated))
    return tuple(i for i, rotates in enumerate(rotated) if not rotates)


def read_hf_head_dim(read: Fields, kind: str, default: int) -> int:
    """Width of a head, which Nemotron-H has under another key."""
    if kind == "nemotron_h":
        return read_head_dim(read, ("head_dim", "attention_head_dim"), 128)
    return read_head_dim(read, ("head_dim",), default)


def read_windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    """Sliding window and its layers, by the rules of the classes of transformers."""
    optional = kind.startswith("qwen") or kind == "smollm3"
    if kind in UNWINDOWED or (optional and not read.flag("use_sliding_window", default=False)):
        return 0, ()
    window = read.integer("sliding_window", default=0)
    if not window:
        return 0, ()
    types = () if kind in ("mistral", "mixtral", "qwen3_moe") else read.texts("layer_types")
    if types:
        if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
            raise read.wrong("layer_types", f"{layers} of sliding_attention or full_attention", list(types))
        return window, tuple(i for i, t in enumerate(types) if t == "sliding_attention")
    if kind == "smollm3":
        return window, read_unrotated_layers(read, kind, layers)
    if kind in ("gemma2", "gpt_oss"):
        return window, tuple(range(0, layers, 2))
    if kind == "gemma3_text":
        pattern = read.integer("sliding_window_pattern", "_sliding_window_pattern", default=6, least=1)
        return window, tuple(i for i in range(layers) if (i + 1) % pattern)
    full = read.integer("max_window_layers", default=layers)
    if kind == "qwen2_moe":
        return window, tuple(range(0, min(full, layers), 2))
    return window, tuple(range(full if kind in ("qwen2", "qwen3") else 0, layers))


def read_latent(read: Fields, kind: str) -> MLAConfig | None:
    """Multi-head latent attention; None: the architecture has none."""
    if kind not in LATENT_KINDS:
        return None
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


def latent_rope(read: Fields, rope: RopeConfig, latent: MLAConfig) -> RopeConfig:
    """The rotary embedding of the rotary part of a head, all of which is rotated."""
    if rope.fraction != 1:
        raise read.wrong("partial_rotary_factor", "1 for latent attention", rope.fraction)
    return replace(rope, fraction=latent.rope_dim / (latent.nope_dim + latent.rope_dim))


def latent_scale(read: Fields, rope: RopeConfig, head_dim: int) -> float:
    """Factor on query-key products of latent attention, which YaRN's `mscale_all_dim` changes."""
    scaling = read.fields("rope_scaling")
    holder = scaling if scaling.raw else read.fields("rope_parameters")
    mscale = holder.number("mscale_all_dim", default=0.0, least=0)
    scale: float = head_dim**-0.5
    return scale if rope.kind == "default" else scale * (0.1 * mscale * log(max(rope.factor, 1.0)) + 1) ** 2


def read_ropes(read: Fields, kind: str, context: int, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of all layers, and of the sliding-window layers where it differs."""
    scaling, parameters = read.fields("rope_scaling"), read.fields("rope_parameters")
    theta = read.positive("rope_theta", default=10000.0)
    fraction = read.positive("partial_rotary_factor", default=1.0)
    nested = [name for name, value in parameters.raw.items() if isinstance(value, Mapping)]
    if nested and kind != "gemma3_text" and not read.has("layer_types"):
        raise parameters.wrong(
            nested[0], "a number or a name where no layer_types are given", parameters.raw[nested[0]]
        )
    if not nested and kind != "gemma3_text":
        chosen = scaling if scaling.raw else parameters
        return read_rope(chosen, theta, context, head_dim, read, fraction), None
    if parameters.raw and not nested:
        raise read.wrong("rope_parameters", "one object per type of layer", dict(parameters.raw))
    if not set(nested) <= set(_LAYER_TYPES):
        raise read.wrong("rope_parameters", f"objects of {' and '.join(_LAYER_TYPES)}", dict(parameters.raw))
    full, sliding = (parameters.fields(name) for name in _LAYER_TYPES)
    full = Fields({**full.raw, **scaling.raw}, read.source, "rope_parameters.full_attention.")
    local_theta = read.positive("rope_local_base_freq", default=10000.0 if kind == "gemma3_text" else theta)
    return (
        read_rope(full, theta, context, head_dim, fraction=fraction),
        read_rope(sliding, local_theta, context, head_dim, fraction=fraction),
    )
