"""Reads `ModelConfig` from the metadata of a GGUF file."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foretell.model.config.families import GGUF_KINDS, KINDS, family_of
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.values import (
    GGUF_EOS,
    MAX_CONTEXT,
    MAX_LAYERS,
    checked_config,
    contexts_of,
    eos_token_ids,
    known_architectures,
    read_head_dim,
)
from foretell.model.config.rope import read_gguf_rope
from foretell.utils.validation import Fields

_END_TOKENS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "[e~[",
    "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
))  # fmt: skip
"""Control tokens that end an answer, by the names that llama.cpp knows."""
_HARMONY_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Where a file has both of a pair (gpt-oss, Solar), `<|end|>` ends only a part of an answer."""
_CONTROL_TOKEN = 3
"""The token type of control tokens in GGUF."""


def from_gguf(
    meta: Mapping[str, Any],
    source: str = "GGUF file",
    rope_factors: Mapping[str, Sequence[float]] | None = None,
    tensors: Collection[str] | None = None,
) -> ModelConfig:
    """Read the metadata of a GGUF file (keys of the format's specification, values as Python objects).

    `rope_factors`: the file's tensors `rope_freqs`, `rope_factors_short` and `rope_factors_long`, those that it has.
    `tensors`: the names of the file's tensors, which say whether the output matrix is the embedding, and which biases
    there are; None: the architecture says.

    Raises:
        ValueError: a required key is missing, a value has the wrong type or is out of range, or the architecture is not
            supported.
    """
    whole = Fields(meta, source)
    name = whole.text("general.architecture")
    if meta.get("general.type") == "adapter":
        raise ValueError(
            f"{source}: a model was asked for, and this is an adapter for one of the architecture {name}; name it with "
            "--lora, and its model with --model"
        )
    if name not in GGUF_KINDS:
        raise ValueError(
            f"{source}: the decoder does not know GGUF architecture {name!r}; {known_architectures(name, GGUF_KINDS)}"
        )
    kind = GGUF_KINDS[name]
    own = {k.removeprefix(name + "."): v for k, v in meta.items()}
    blocks = Fields(own, source, f"{name}.")
    predicting = blocks.integer("nextn_predict_layers", default=0)
    layers = blocks.integer("block_count", least=1 + predicting, most=MAX_LAYERS) - predicting
    own = {k: _of_layers(v, layers + predicting, layers) for k, v in own.items()}
    family = family_of(kind)
    read = Fields(family.prepare_gguf(own), source, f"{name}.")
    if kind == "llama" and read.integer("expert_count", default=0):
        kind = "mixtral"
    hidden, heads = (read.integer(k, least=1) for k in ("embedding_length", "attention.head_count"))
    context = read.integer("context_length", least=1, most=MAX_CONTEXT)
    head_dim = read_head_dim(read, ("attention.key_length",), hidden // heads)
    rope, window = read_gguf_rope(read, context, head_dim, rope_factors or {}), "attention.sliding_window"
    values: dict[str, Any] = {
        "architecture": kind,
        "vocab": read.integer("vocab_size", default=0) or len(_require_list(whole, "tokenizer.ggml.tokens")),
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": read.integer("attention.head_count_kv", default=heads, least=1),
        "head_dim": head_dim,
        "ffn": read.integer("feed_forward_length", least=1),
        **contexts_of(rope, context),
        "norm_eps": read.number("attention.layer_norm_rms_epsilon", default=1e-6, least=0),
        "rope": rope,
        "window": read.integer(window, default=0),
        "window_layers": tuple(range(layers)) if read.integer(window, default=0) else (),
        "attention_softcap": read.number("attn_logit_softcapping", default=0.0, least=0),
        "logit_softcap": read.number("final_logit_softcapping", default=0.0, least=0),
        "bos": next(iter(whole.integers("tokenizer.ggml.bos_token_id")), None),
        "eos": _gguf_eos(whole),
        **KINDS[kind].settings,
        "tied": tensors is not None and "output.weight" not in tensors,
    }
    parts = {name.split(".", 2)[-1] for name in tensors or ()}
    biases = {} if tensors is None else {key: not parts.isdisjoint(names) for key, names in _BIASES.items()}
    further = family_of(kind).read_gguf(Fields(own, source, f"{name}."), kind, values, tensors or ())
    return checked_config(source, **{**values, **further, **biases})


_BIASES = {
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"),
    "output_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}
"""Settings of biases, and the tensors of layers of which a file has one if they are on."""


def _of_layers(value: Any, blocks: int, layers: int) -> Any:
    """A list of one entry per block without those of multi-token prediction, and the number that all others have; other
    values as they are.
    """
    if not isinstance(value, list) or len(value) != blocks:
        return value
    own = value[:layers]
    same = not isinstance(own[0], bool | str | list) and all(each == own[0] for each in own)
    return own[0] if same else own


def _require_list(read: Fields, name: str) -> list[Any]:
    value = read.raw.get(name)
    if not isinstance(value, list):
        raise read.wrong(name, "a list", value)
    return value


def _gguf_eos(read: Fields) -> tuple[int, ...]:
    """End-of-sequence tokens, by the rules of llama.cpp."""
    eos = eos_token_ids(read, *GGUF_EOS)
    tokens, types = (read.raw.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        return eos
    ends = {
        t: i
        for i, (t, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and t in _END_TOKENS
    }
    if any(pair <= ends.keys() for pair in _HARMONY_ENDS):
        ends.pop("<|end|>", None)
    if "<|tool_response>" in ends:  # Gemma 4 has a `</s>` that ends nothing.
        ends.pop("</s>", None)
    return tuple(dict.fromkeys((*eos, *ends.values())))
