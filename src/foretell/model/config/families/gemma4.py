"""Gemma 4: per-layer inputs, keys and values that the last layers share, heads of two sizes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.model.config.attention import LayerInputConfig
from foretell.model.config.families.base import Family, Kind, fused_experts, gguf_experts, gguf_flags
from foretell.model.config.rope import RopeConfig, read_rope
from foretell.utils.validation import Fields

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6
"""Every sixth layer has full attention where the configuration does not say which."""
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def _read(read: Fields, layers: int) -> dict[str, Any]:
    """The values of `ModelConfig` that are Gemma 4's own."""
    if read.raw.get("use_bidirectional_attention") == "all":
        raise read.wrong("use_bidirectional_attention", "vision or left out: the decoder is causal", "all")
    types = _layer_types(read, layers)
    full = tuple(i for i, kind in enumerate(types) if kind == _FULL)
    hidden, ffn = read.integer("hidden_size", least=1), read.integer("intermediate_size", least=1)
    head_dim, kv_heads = read.integer("head_dim", default=256, least=2), read.integer("num_key_value_heads", default=4)
    full_dim, full_kv_heads = _full_sizes(read, full, head_dim, kv_heads)
    rope, local_rope = _ropes(read, full_dim, head_dim)
    biased = read.flag("attention_bias", default=False)
    width = read.integer("hidden_size_per_layer_input", default=256)
    return {
        "head_dim": full_dim,
        "kv_heads": full_kv_heads,
        "local_head_dim": head_dim,
        "local_kv_heads": kv_heads,
        "ffn": ffn,
        "reader_ffn": 2 * ffn if read.flag("use_double_wide_mlp", default=False) else 0,
        "rope": rope,
        "local_rope": local_rope,
        "window": read.integer("sliding_window", default=512, least=1),
        "window_layers": tuple(i for i in range(layers) if i not in full),
        "kv_layers": _kv_layers(read, types, read.integer("num_kv_shared_layers", default=0)),
        "values_are_keys": read.flag("attention_k_eq_v", default=False),
        "qkv_bias": biased,
        "output_bias": biased,
        "attention_scale": 1.0,
        "embedding_scale": hidden**0.5,
        "logit_softcap": read.number("final_logit_softcapping", default=0.0, least=0),
        "layer_inputs": LayerInputConfig(width, read.integer("vocab_size_per_layer_input", default=262144, least=1))
        if width
        else None,
        "experts": _experts(read, layers) if read.flag("enable_moe_block", default=False) else None,
    }


def _layer_types(read: Fields, layers: int) -> tuple[str, ...]:
    default = [_FULL if (i + 1) % _PATTERN == 0 else _SLIDING for i in range(layers)]
    types = read.texts("layer_types") or tuple(default)
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise read.wrong("layer_types", f"{layers} of {_SLIDING} or {_FULL}", list(types))
    return (*types[:-1], _FULL)


def _full_sizes(read: Fields, full: Sequence[int], head_dim: int, kv_heads: int) -> tuple[int, int]:
    """Width and number of the key-value heads in layers with full attention."""
    overrides = read.fields("per_layer_config")
    if not overrides.raw:
        dim = read.integer("global_head_dim", default=512, least=2)
        own = read.flag("attention_k_eq_v", default=False) and read.has("num_global_key_value_heads")
        return dim, read.integer("num_global_key_value_heads", least=1) if own else kv_heads
    each = [overrides.fields(str(i)) for i in full]
    first = each[0]
    known = {"head_dim", "num_key_value_heads"}
    same = len(overrides.raw) == len(each) and all(one.raw == first.raw for one in each) and set(first.raw) <= known
    if not same:
        raise read.wrong("per_layer_config", "head_dim and num_key_value_heads of all full layers", overrides.raw)
    return (
        first.integer("head_dim", default=head_dim, least=2),
        first.integer("num_key_value_heads", default=kv_heads, least=1),
    )


def _ropes(read: Fields, full_dim: int, local_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embedding of full and of sliding-window layers."""
    parameters = read.fields("rope_parameters")
    holder = parameters if parameters.raw else Fields(_ROPES, read.source, "rope_parameters.")
    holder.require(_FULL, _SLIDING)
    if set(holder.raw) != {_FULL, _SLIDING}:
        raise read.wrong("rope_parameters", f"objects of {_FULL} and {_SLIDING}", dict(holder.raw))
    trained = read.integer("max_position_embeddings", least=1)
    full, local = holder.fields(_FULL), holder.fields(_SLIDING)
    return read_rope(full, 1e6, trained, full_dim), read_rope(local, 1e4, trained, local_dim)


def _kv_layers(read: Fields, types: Sequence[str], shared: int) -> tuple[int, ...]:
    """For every layer the one whose keys and values it reads: of those shared the last one before, of the same type."""
    layers = len(types)
    own = layers - shared
    if not shared:
        return ()
    last = {kind: i for i, kind in enumerate(types[: max(own, 0)])}
    if set(last) != set(types):
        raise read.wrong(
            "num_kv_shared_layers", f"less, so that {' and '.join(sorted(set(types)))} come before", shared
        )
    return tuple(i if i < own else last[kind] for i, kind in enumerate(types))


def _experts(read: Fields, layers: int) -> dict[str, Any]:
    count = read.integer("num_experts", least=1)
    return {
        "count": count,
        "active": read.integer("top_k_experts", least=1, most=count),
        "ffn": read.integer("moe_intermediate_size", least=1),
        "layers": tuple(range(layers)),
        "beside_dense": True,
    }


_LISTS = ("attention.head_count_kv", "feed_forward_length")


def _prepare_gguf(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """One number in place of those of the layers, which `_read_gguf` reads."""
    return {k: v[0] if k in _LISTS and isinstance(v, list) and v else v for k, v in raw.items()}


def _read_gguf(read: Fields, kind: str, values: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
    layers = values["layers"]
    local = gguf_flags(read, "attention.sliding_window_pattern", layers)
    full = [i for i, is_local in enumerate(local) if not is_local]
    shared = read.integer("attention.shared_kv_layers", default=0, most=layers)
    heads, widths = (_of_layers(read, name, layers) for name in _LISTS)
    kv_heads, local_heads = ({heads[i] for i in range(layers) if local[i] == which} for which in (False, True))
    own, readers = set(widths[: layers - shared]), set(widths[layers - shared :])
    if not full or any(len(each) > 1 for each in (kv_heads, local_heads, own, readers)):
        raise read.wrong("attention.sliding_window_pattern", "layers of two kinds with one size each", list(local))
    local_dim = read.integer("attention.key_length_swa", least=2)
    rotated = read.integer("rope.dimension_count_swa", default=local_dim, least=2, most=local_dim)
    width, experts = read.integer("embedding_length_per_layer_input", default=0), None
    if read.integer("expert_count", default=0):
        experts = replace(gguf_experts(read, layers), beside_dense=True)
    return {
        "kv_heads": kv_heads.pop(),
        "local_head_dim": local_dim,
        "local_kv_heads": local_heads.pop() if local_heads else 0,
        "ffn": own.pop(),
        "reader_ffn": readers.pop() if readers else 0,
        "local_rope": RopeConfig(
            theta=read.positive("rope.freq_base_swa", default=10000.0), fraction=rotated / local_dim
        ),
        "window": read.integer("attention.sliding_window", least=1),
        "window_layers": tuple(i for i, is_local in enumerate(local) if is_local),
        "kv_layers": _kv_layers(read, [_SLIDING if each else _FULL for each in local], shared),
        "values_are_keys": f"blk.{full[0]}.attn_v.weight" not in tensors,
        "attention_scale": 1.0,
        "embedding_scale": values["hidden"] ** 0.5,
        "layer_inputs": LayerInputConfig(width, values["vocab"]) if width else None,
        "layer_scales": "blk.0.layer_output_scale.weight" in tensors,
        "experts": experts,
    }


def _of_layers(read: Fields, name: str, layers: int) -> tuple[int, ...]:
    """A number for every layer, where GGUF has one for all, or one for each."""
    numbers = read.integers(name)
    if len(numbers) not in (1, layers) or min(numbers) < 1:
        raise read.wrong(name, f"one number, or {layers}, above zero", list(numbers))
    return numbers * layers if len(numbers) == 1 else numbers


_SETTINGS: Mapping[str, Any] = {
    "post_norms": True, "qk_norm": True, "value_norm": True, "activation": "gelu_tanh", "layer_scales": True,
    "tied": True,
}  # fmt: skip
_TOKENS = {"bos_token_id": 2, "eos_token_id": 1}
GEMMA4 = Family(
    kinds={
        "gemma4_text": Kind(_SETTINGS, {"max_position_embeddings": 131072, **_TOKENS}, text_of="gemma4"),
        "gemma4_unified_text": Kind(
            _SETTINGS,
            {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0, **_TOKENS},
            text_of="gemma4_unified",
        ),
    },
    names={"mlp.gate": "router.proj", "mlp.experts": "experts"},
    gguf_kinds={"gemma4": "gemma4_text"},
    gguf_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.{}.gate_proj": "ffn_gate_exps",
        "experts.{}.up_proj": "ffn_up_exps",
        "experts.{}.down_proj": "ffn_down_exps",
    },
    gguf_rows=fused_experts("experts"),
    prepare_gguf=_prepare_gguf,
    read_gguf=_read_gguf,
    read_all=_read,
)
