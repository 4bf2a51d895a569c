"""Reads `ModelConfig` from a Hugging Face `config.json`."""

from collections.abc import Mapping
from typing import Any

from foretell.model.config.families import FAMILIES
from foretell.model.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, ModelConfig, MoEConfig
from foretell.model.config.readers.architectures import (
    ARCHITECTURES,
    DEFAULTS,
    GRANITE,
    MAX_CONTEXT,
    MAX_LAYERS,
    OPTIONAL_BIAS,
    TEXT_MODELS,
)
from foretell.model.config.readers.compressed import base_config, read_compressed
from foretell.model.config.readers.hf_attention import (
    latent_rope,
    latent_scale,
    read_attention_scale,
    read_hf_head_dim,
    read_latent,
    read_ropes,
    read_unrotated_layers,
    read_windows,
)
from foretell.model.config.readers.hf_experts import read_experts
from foretell.model.config.readers.values import checked_config, contexts_of, eos_token_ids
from foretell.model.config.states import read_state, with_layer_types
from foretell.utils.validation import Fields

_GLM_FLAGS = {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"}
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu": "relu",
}  # fmt: skip
_NORM_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


def from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face `config.json`; missing keys have the defaults of transformers.

    Raises:
        ValueError: a required key is missing, a value has the wrong type or is out of range, or the architecture is not
            supported.
    """
    base = base_config(raw, source)
    compressed = read_compressed(raw, source)
    raw = with_layer_types(_text_config(base, source), source)
    kind = Fields(raw, source).text("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{source}: the decoder does not know model_type {kind!r}; it knows {', '.join(ARCHITECTURES)}"
        )
    read, gemma = Fields({**DEFAULTS[kind], **raw}, source), kind.startswith("gemma")
    if kind in FAMILIES:
        return _from_family(read, kind)
    fixed = dict(ARCHITECTURES[kind]) | compressed
    hidden, heads = (read.integer(k, least=1) for k in ("hidden_size", "num_attention_heads"))
    layers = read.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    context = read.integer("max_position_embeddings", least=1, most=MAX_CONTEXT)
    window, window_layers = read_windows(read, kind, layers)
    latent = read_latent(read, kind)
    head_dim = latent.nope_dim + latent.rope_dim if latent else read_hf_head_dim(read, kind, hidden // heads)
    rope, local_rope = read_ropes(read, kind, context, head_dim)
    if latent is not None:
        rope = latent_rope(read, rope, latent)
    fixed |= _activation(read, *(["hidden_activation"] if gemma else ["hidden_act", "hidden_activation"]))
    if kind in OPTIONAL_BIAS and read.flag("attention_bias", default=False):
        fixed |= {"qkv_bias": True, "output_bias": True}
    if kind == "glm4_moe":
        fixed |= {name: read.flag(key, default=False) for name, key in _GLM_FLAGS.items()}
    if kind == "qwen2_moe":
        fixed["qkv_bias"] = read.flag("qkv_bias", default=True)
    if kind == "gpt_oss":
        fixed["activation"] = _clamped_swiglu(read)
    if kind == "nemotron_h":
        fixed |= _single_mixers(read)
    if gemma and read.flag("use_bidirectional_attention", default=False):
        raise ValueError(f"{source}: use_bidirectional_attention is not supported: the decoder is causal")
    tied = read.flag(
        *(["tie_embedding"] if kind == "lfm2" else []), "tie_word_embeddings", default=bool(fixed.pop("tied", False))
    )

    def multiplier(name: str) -> float:
        return read.positive(name, default=1.0) if kind in GRANITE else 1.0

    return checked_config(
        source,
        architecture=kind,
        vocab=read.integer("vocab_size", least=1),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else read.integer("num_key_value_heads", default=heads, least=1),
        head_dim=head_dim,
        latent=latent,
        ffn=_ffn(read, kind),
        **contexts_of(rope, context),
        norm_eps=read.number(*_NORM_EPS, default=1e-5 if kind == "lfm2" else 1e-6, least=0),
        rope=rope,
        local_rope=local_rope,
        tied=tied,
        mlp_bias=kind in ("llama", "granite", "smollm3", "nemotron_h") and read.flag("mlp_bias", default=False),
        window=window,
        window_layers=window_layers,
        attention_scale=latent_scale(read, rope, head_dim) if latent else read_attention_scale(read, kind),
        attention_softcap=read.number("attn_logit_softcapping", default=0.0, least=0) if gemma else 0.0,
        logit_softcap=read.number("final_logit_softcapping", default=0.0, least=0) if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else multiplier("embedding_multiplier"),
        residual_scale=multiplier("residual_multiplier"),
        logit_scale=1 / multiplier("logits_scaling"),
        unrotated_layers=read_unrotated_layers(read, kind, layers),
        experts=read_experts(read, kind, layers),
        state=read_state(read, kind, layers),
        mask_token=_read_mask_token(read),
        bos=next(iter(read.integers("bos_token_id")), None),
        eos=eos_token_ids(read),
        **fixed,
    )


def _read_mask_token(read: Fields) -> int | None:
    """The mask token of a PARD draft model; None: it is none.

    Raises:
        ValueError: it is not in the vocabulary, or the model is a PARD-2 that reads the target's hidden states.
    """
    if read.has("pard2_target_layers"):
        raise ValueError(
            f"{read.source}: a PARD-2 draft model that reads its target's hidden states (pard2_target_layers), which "
            "is not supported; use a PARD checkpoint of this family"
        )
    token = read.integer("pard_token", default=-1, least=-1)
    vocab = read.integer("vocab_size", least=1)
    if token >= vocab:
        raise ValueError(f"{read.source}: pard_token is {token}, and its vocabulary has {vocab} tokens; is it damaged?")
    return None if token < 0 else token


def _from_family(read: Fields, kind: str) -> ModelConfig:
    """A configuration whose family has a reader of its own."""
    layers = read.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    values = {**ARCHITECTURES[kind], **FAMILIES[kind](read, layers)}
    values |= _activation(read, "hidden_activation", "hidden_act")
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


def _activation(read: Fields, *names: str) -> dict[str, Activation]:
    """The activation under one of these keys; none where they are missing."""
    name = read.text(*names, default="")
    if name and name not in _ACTIVATIONS:
        raise ValueError(f"{read.source}: unknown activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[name]} if name else {}


def _ffn(read: Fields, kind: str) -> int:
    """Width of the dense feed-forward networks, or of the experts where all are experts."""
    if kind == "granitemoehybrid":
        return read.integer("shared_intermediate_size", default=1024, least=1)
    if kind != "lfm2":
        return read.integer("intermediate_size", default=0) or read.integer("moe_intermediate_size", least=1)
    width = read.integer("block_ff_dim", "intermediate_size", least=1)
    if not read.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiple = read.integer("block_multiple_of", default=256, least=1)
    scaled = int(read.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-scaled // multiple) * multiple


def _single_mixers(read: Fields) -> dict[str, Any]:
    """Settings of Nemotron-H, whose layers are Mamba-2, attention, a feed-forward network or a mixture of experts."""
    activation = read.text("mlp_hidden_act", default="relu2")
    if activation != "relu2":
        raise read.wrong("mlp_hidden_act", "relu2: no other activation is supported for nemotron_h", activation)
    types = read.texts("layer_types")
    networks = tuple(i for i, kind in enumerate(types) if kind in ("mlp", "moe"))
    return {
        "activation": "relu2",
        "attention_free_layers": networks,
        "mlp_free_layers": tuple(i for i in range(len(types)) if i not in networks),
    }


def _clamped_swiglu(read: Fields) -> Activation:
    """The activation of gpt-oss, whose constants are fixed here."""
    for name, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if read.number(name) != known:
            raise read.wrong(name, f"{known}: no other value is supported", read.raw[name])
    return "clamped_swiglu"


def _text_config(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The language model of a multimodal configuration; other configurations unchanged."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        return raw
    whole = Fields(raw, source)
    text = dict(whole.fields("text_config").raw)
    eos = eos_token_ids(whole) + eos_token_ids(Fields(text, source))
    own = text.get("model_type") if kind == "mistral3" else None
    text |= {"model_type": own or TEXT_MODELS[kind]} | ({"eos_token_id": list(eos)} if eos else {})
    return text | ({"tie_word_embeddings": raw["tie_word_embeddings"]} if whole.has("tie_word_embeddings") else {})
