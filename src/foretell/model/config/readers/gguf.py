"""Reads `ModelConfig` from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.model.config.families import GGUF_KINDS, KINDS, family_of
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.config.readers.values import (
    MAX_CONTEXT,
    MAX_LAYERS,
    checked_config,
    contexts_of,
    eos_token_ids,
    read_head_dim,
)
from foretell.model.config.rope import RopeConfig, read_gguf_rope
from foretell.utils.validation import Fields

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of Gemma's 27B models, by which llama.cpp recognises them; only their attention scale is
(hidden / heads) ** -0.5.
"""
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a chat turn; llama.cpp uses these names where a file has no `eot_token_id`."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an answer of gpt-oss; `<|end|>` ends only one of its messages."""
_CONTROL_TOKEN = 3
"""The token type of control tokens in GGUF."""


def from_gguf(
    meta: Mapping[str, Any],
    source: str = "GGUF file",
    rope_factors: Mapping[str, Sequence[float]] | None = None,
    tied: bool = False,
) -> ModelConfig:
    """Read the metadata of a GGUF file (keys of the format's specification, values as Python objects).

    `rope_factors`: the file's tensors `rope_freqs`, `rope_factors_short` and `rope_factors_long`, those that it has.
    `tied`: the file has no `output.weight`.

    Raises:
        ValueError: a required key is missing, a value has the wrong type or is out of range, or the architecture is not
            supported.
    """
    whole = Fields(meta, source)
    name = whole.text("general.architecture")
    if name not in GGUF_KINDS:
        raise ValueError(
            f"{source}: the decoder does not know GGUF architecture {name!r}; it knows {', '.join(GGUF_KINDS)}"
        )
    kind = GGUF_KINDS[name]
    read = Fields({k.removeprefix(name + "."): v for k, v in meta.items()}, source, f"{name}.")
    if kind == "llama" and read.integer("expert_count", default=0):
        kind = "mixtral"
    gemma = kind.startswith("gemma")
    hidden, heads = (read.integer(k, least=1) for k in ("embedding_length", "attention.head_count"))
    layers = read.integer("block_count", least=1, most=MAX_LAYERS)
    context = read.integer("context_length", least=1, most=MAX_CONTEXT)
    head_dim = read_head_dim(read, ("attention.key_length",), hidden // heads)
    if kind == "llama" and read.integer("rope.dimension_count", default=head_dim) != head_dim:
        raise read.wrong("rope.dimension_count", f"{head_dim}, all of a head", read.raw["rope.dimension_count"])
    rope = read_gguf_rope(read, context, head_dim, rope_factors or {})
    window = read.integer("attention.sliding_window", default=4096 if kind == "gemma2" else 0)
    pattern = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(kind, 1)
    patterned = gemma or kind == "gpt_oss"
    if patterned:
        pattern = read.integer("attention.sliding_window_pattern", default=pattern, least=1)
    windowed = tuple(i for i in range(layers) if not patterned or (i + 1) % pattern) if window else ()
    caps = (50.0, 30.0) if kind == "gemma2" else (0.0, 0.0)
    return checked_config(
        source,
        architecture=kind,
        vocab=read.integer("vocab_size", default=0) or len(_require_list(whole, "tokenizer.ggml.tokens")),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=read.integer("attention.head_count_kv", default=heads, least=1),
        head_dim=head_dim,
        ffn=read.integer("feed_forward_length", least=1),
        **contexts_of(rope, context),
        norm_eps=read.number("attention.layer_norm_rms_epsilon", default=1e-6, least=0),
        rope=replace(rope, truncate=False) if kind == "gpt_oss" else rope,
        local_rope=RopeConfig(theta=read.positive("rope.freq_base_swa", default=10000.0))
        if kind == "gemma3_text"
        else None,
        window=window,
        window_layers=windowed,
        attention_scale=(hidden // heads) ** -0.5 if layers == _GEMMA_27B_LAYERS.get(kind) else None,
        attention_softcap=read.number("attn_logit_softcapping", default=caps[0], least=0),
        logit_softcap=read.number("final_logit_softcapping", default=caps[1], least=0),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        experts=_gguf_experts(read, kind, layers),
        bos=next(iter(whole.integers("tokenizer.ggml.bos_token_id")), None),
        eos=_gguf_eos(whole),
        # GGUF files hold Gemma's norm weights with the offset of 1 added.
        **{**KINDS[kind].settings, "norm_offset": 0.0, "tied": tied or gemma, **family_of(kind).gguf_settings},
    )


def _gguf_experts(read: Fields, kind: str, layers: int) -> MoEConfig | None:
    """The mixture of experts of a GGUF file: in all layers of the architectures that have one."""
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"):
        return None
    count, dense = read.integer("expert_count", least=1), read.integer("feed_forward_length", least=1)
    active = read.integer("expert_used_count", least=1, most=count)
    narrow = dense // active if kind == "qwen2_moe" else dense
    shared = read.integer("expert_shared_feed_forward_length", default=dense) if kind == "qwen2_moe" else 0
    return MoEConfig(
        count=count,
        active=active,
        ffn=read.integer("expert_feed_forward_length", default=narrow, least=1),
        shared_ffn=shared,
        shared_gate=shared > 0,
        renormalize=kind != "qwen2_moe",
        layers=tuple(range(layers)),
        router_bias=kind == "gpt_oss",
        bias=kind == "gpt_oss",
    )


def _require_list(read: Fields, name: str) -> list[Any]:
    value = read.raw.get(name)
    if not isinstance(value, list):
        raise read.wrong(name, "a list", value)
    return value


def _gguf_eos(read: Fields) -> tuple[int, ...]:
    """End-of-sequence tokens, by the rules of llama.cpp."""
    eos = eos_token_ids(read, *(f"tokenizer.ggml.{key}" for key in _GGUF_EOS_KEYS))
    if read.raw.get("general.architecture") == "gpt-oss":
        names = read.raw.get("tokenizer.ggml.tokens") or ()
        return tuple(dict.fromkeys((*eos, *(i for i, token in enumerate(names) if token in _HARMONY_ENDS))))
    tokens, types = (read.raw.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if read.has("tokenizer.ggml.eot_token_id") or not isinstance(tokens, list) or not isinstance(types, list):
        return eos
    pairs = enumerate(zip(tokens, types, strict=False))
    end_of_turn = (i for i, (t, kind) in pairs if kind == _CONTROL_TOKEN and t in _END_OF_TURN_TOKENS)
    return tuple(dict.fromkeys((*eos, *end_of_turn)))
