"""Reads `ModelConfig` from a Hugging Face `config.json`."""

from collections.abc import Callable, Mapping
from typing import Any

from foretell.model.config.families import KINDS, TEXT_MODELS, family_of
from foretell.model.config.model import Activation, ModelConfig, MoEConfig
from foretell.model.config.readers.compressed import COMPRESSED, base_config, read_compressed
from foretell.model.config.readers.values import (
    MAX_CONTEXT,
    MAX_LAYERS,
    checked_config,
    contexts_of,
    eos_token_ids,
    known_architectures,
)
from foretell.model.config.rope import RopeConfig, read_rope
from foretell.utils.validation import Fields

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu": "relu",
}  # fmt: skip
IMAGE_READERS = ("llava", "idefics3", "smolvlm")
"""Multimodal values of `model_type` whose language model names its own, and reads an image as embeddings in the places
of tokens.
"""
_LLAMA_DEFAULTS = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Of transformers; Llava's files leave them out."""
_NORM_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


def from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face `config.json`; missing keys have the defaults of transformers.

    Raises:
        ValueError: a required key is missing, a value has the wrong type or is out of range, or the architecture is not
            supported.
    """
    base = base_config(raw, source)
    compressed = read_compressed(raw, source)
    raw = _text_config(base, source)
    kind = Fields(raw, source).text("model_type")
    if kind not in KINDS:
        raise ValueError(f"{source}: the decoder does not know model_type {kind!r}; {known_architectures(kind, KINDS)}")
    family, settings = family_of(kind), KINDS[kind]
    raw = family.prepare(raw, source)
    read = Fields({**settings.defaults, **raw}, source)
    if family.read_all is not None:
        return _from_family(read, kind, family.read_all)
    fixed = dict(settings.settings) | compressed
    hidden, heads = (read.integer(k, least=1) for k in ("hidden_size", "num_attention_heads"))
    layers = read.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    context = read.integer("max_position_embeddings", least=1, most=MAX_CONTEXT)
    window, window_layers = family.read_windows(read, kind, layers)
    head_dim = family.read_head_dim(read, hidden // heads)
    rope, local_rope = _read_ropes(read, settings.local_rope, context, head_dim)
    fixed |= _read_activation(read, *family.activation_keys)
    if settings.optional_bias and read.flag("attention_bias", default=False):
        fixed |= {"qkv_bias": True, "output_bias": True}
    values: dict[str, Any] = {
        "architecture": kind,
        "vocab": read.integer("vocab_size", least=1),
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": read.integer("num_key_value_heads", default=heads, least=1),
        "head_dim": head_dim,
        "ffn": family.read_ffn(read, kind),
        **contexts_of(rope, context),
        "norm_eps": read.number(*_NORM_EPS, default=1e-6, least=0),
        "rope": rope,
        "local_rope": local_rope,
        "window": window,
        "window_layers": window_layers,
        "experts": family.read_experts(read, kind, layers),
        "state": family.read_state(read, kind, layers),
        "mask_token": _read_mask_token(read),
        "bos": next(iter(read.integers("bos_token_id")), None),
        "eos": eos_token_ids(read),
        **fixed,
        "tied": read.flag("tie_word_embeddings", default=bool(fixed.get("tied", False))),
    }
    return checked_config(source, **{**values, **family.read_further(read, kind, values)})


def _read_mask_token(read: Fields) -> int | None:
    """The mask token of a PARD draft model; None: it is none."""
    token = read.integer("pard_token", default=-1, least=-1)
    vocab = read.integer("vocab_size", least=1)
    if token >= vocab:
        raise ValueError(f"{read.source}: pard_token is {token}, and its vocabulary has {vocab} tokens; is it damaged?")
    return None if token < 0 else token


def _from_family(read: Fields, kind: str, read_all: Callable[[Fields, int], dict[str, Any]]) -> ModelConfig:
    """A configuration whose family has a reader of its own."""
    layers = read.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    values = {**KINDS[kind].settings, **read_all(read, layers)}
    values |= _read_activation(read, "hidden_activation", "hidden_act")
    experts = values.pop("experts", None)
    return checked_config(
        read.source,
        architecture=kind,
        vocab=read.integer("vocab_size", least=1),
        hidden=read.integer("hidden_size", least=1),
        layers=layers,
        heads=read.integer("num_attention_heads", least=1),
        **contexts_of(values["rope"], read.integer("max_position_embeddings", least=1, most=MAX_CONTEXT)),
        norm_eps=read.number("rms_norm_eps", default=1e-6, least=0),
        tied=read.flag("tie_word_embeddings", default=values.pop("tied", False)),
        experts=None if experts is None else MoEConfig(**experts),
        bos=next(iter(read.integers("bos_token_id")), None),
        eos=eos_token_ids(read),
        **values,
    )


def _read_activation(read: Fields, *names: str) -> dict[str, Activation]:
    """The activation under one of these keys; none where they are missing."""
    name = read.text(*names, default="")
    if name and name not in _ACTIVATIONS:
        raise ValueError(f"{read.source}: unknown activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[name]} if name else {}


def _text_kind(raw: Mapping[str, Any]) -> object:
    """The `model_type` of a configuration, or of the language model of a multimodal one where this names its own."""
    kind, text = raw.get("model_type"), raw.get("text_config")
    if kind in ("mistral3", *IMAGE_READERS) and isinstance(text, Mapping):
        return text.get("model_type") or ("llama" if kind in IMAGE_READERS else kind)
    return kind


def _text_config(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The language model of a multimodal configuration; other configurations unchanged."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in (*TEXT_MODELS, *IMAGE_READERS):
        return raw
    whole = Fields(raw, source)
    text = dict(whole.fields("text_config").raw)
    if kind in IMAGE_READERS and _text_kind(raw) == "llama":
        text = _LLAMA_DEFAULTS | text
    eos = eos_token_ids(whole) + eos_token_ids(Fields(text, source))
    own = _text_kind(raw)
    text |= {"model_type": TEXT_MODELS.get(kind) if own == kind else own} | ({"eos_token_id": list(eos)} if eos else {})
    return text | ({"tie_word_embeddings": raw["tie_word_embeddings"]} if whole.has("tie_word_embeddings") else {})


def _read_ropes(read: Fields, apart: bool, context: int, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of all layers, and of the sliding-window layers where it differs; `apart`: they always have one
    of their own.
    """
    scaling, parameters = read.fields("rope_scaling"), read.fields("rope_parameters")
    theta = read.positive("rope_theta", default=10000.0)
    fraction = read.positive("partial_rotary_factor", default=1.0)
    nested = [name for name, value in parameters.raw.items() if isinstance(value, Mapping)]
    if nested and not apart and not read.has("layer_types"):
        raise parameters.wrong(
            nested[0], "a number or a name where no layer_types are given", parameters.raw[nested[0]]
        )
    if not nested and not apart:
        chosen = scaling if scaling.raw else parameters
        return read_rope(chosen, theta, context, head_dim, read, fraction), None
    if parameters.raw and not nested:
        raise read.wrong("rope_parameters", "one object per type of layer", dict(parameters.raw))
    if not set(nested) <= set(_LAYER_TYPES):
        raise read.wrong("rope_parameters", f"objects of {' and '.join(_LAYER_TYPES)}", dict(parameters.raw))
    full, sliding = (parameters.fields(name) for name in _LAYER_TYPES)
    full = Fields({**full.raw, **scaling.raw}, read.source, "rope_parameters.full_attention.")
    local_theta = read.positive("rope_local_base_freq", default=10000.0 if apart else theta)
    return (
        read_rope(full, theta, context, head_dim, fraction=fraction),
        read_rope(sliding, local_theta, context, head_dim, fraction=fraction),
    )


def is_decoder_family(raw: Mapping[str, Any]) -> bool:
    """Whether `from_hf` handles a `config.json`: its `model_type` is supported, or missing (then `from_hf` raises)."""
    kind = _text_kind(raw)
    if kind == "cohere" and raw.get("use_qk_norm"):
        return False  # norms of every head of their own (Command R+)
    return not isinstance(kind, str) or kind in TEXT_MODELS or kind in KINDS or kind == COMPRESSED
