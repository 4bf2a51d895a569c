"""Metadata of GGUF files, made from a configuration and a byte-level BPE tokenizer."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from foretell.model.config.model import ModelConfig
from foretell.model.config.rope import RopeConfig
from foretell.model.load.gguf_sizes import write_sizes
from foretell.tokenizer.codec import TextCodec
from foretell.tokenizer.pre_tokenizers import CONTRACTION, PRE_TOKENIZERS

_WRITABLE = ("llama", "mistral", "qwen2", "qwen3")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Token types."""
_SPLITS = ("llama-bpe", "qwen2")
"""llama.cpp's names of pre-tokenizers that split by a pattern."""
_PUBLISHED_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def write_metadata(
    writer: Any, config: ModelConfig, codec: TextCodec, eos: Sequence[int], name: str
) -> Sequence[float]:
    """Write the metadata of a model of the Llama or Qwen family; returns divisors of its rotary frequencies.

    Raises:
        ValueError: another architecture, or a part or a tokenizer that cannot be described.
    """
    c = config
    if c.architecture not in _WRITABLE:
        raise ValueError(
            f"{name}: a GGUF file can be made of {', '.join(_WRITABLE)} directories and of GGUF files, found "
            f"{c.architecture}; write a directory"
        )
    unsupported = {
        "a sliding window": c.window > 0,
        "biases of its output or feed-forward matrices": c.output_bias or c.mlp_bias,
        "biases of queries, keys and values": c.qkv_bias and c.architecture in ("llama", "mistral"),
    }
    part = next((part for part, present in unsupported.items() if present), None)
    if part is not None:
        raise ValueError(f"{name}: {part} cannot be described in a GGUF file; write a directory")
    writer.add_name(name)
    write_sizes(writer, c, c.vocab)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    divisors = _write_rope(writer, c, name)
    _write_tokenizer(writer, c, codec, eos, name)
    return divisors


def _write_rope(writer: Any, c: ModelConfig, name: str) -> Sequence[float]:
    rope = c.rope
    assert rope is not None
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(c.head_dim)
    if rope.fraction != 1 or rope.kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{name}: rotary positions of the kind {rope.kind} cannot be written to GGUF yet")
    if rope.kind == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    return _llama3_divisors(rope, c.head_dim) if rope.kind == "llama3" else rope.divisors


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """Llama 3's scaling as divisors of the frequencies."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rotations = rope.original_context * plain / (2 * torch.pi)
    smooth = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).tolist()


def _write_tokenizer(writer: Any, c: ModelConfig, codec: TextCodec, eos: Sequence[int], name: str) -> None:
    tokenizer = json.loads(codec.tokenizer.to_str())
    model = tokenizer["model"]
    byte_level = "ByteLevel" in json.dumps(tokenizer["decoder"])
    if model.get("type") != "BPE" or model.get("byte_fallback") or not byte_level or not model["merges"]:
        raise ValueError(
            f"{name}: its tokenizer is no byte-level BPE, which alone is written to GGUF; write a directory"
        )
    special = {t["id"]: _CONTROL if t["special"] else _USER_DEFINED for t in tokenizer["added_tokens"]}
    texts = {index: text for text, index in codec.tokenizer.get_vocab(with_added_tokens=True).items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer, name))
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(c.vocab)])
    writer.add_token_types([special.get(i, _NORMAL if i in texts else _UNUSED) for i in range(c.vocab)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    if c.bos is not None:
        writer.add_bos_token_id(c.bos)
    own = None if codec.eos is None else codec.tokenizer.token_to_id(codec.eos)
    first = next(iter(eos), None) if own is None else own
    if first is not None:
        writer.add_eos_token_id(first)
        writer.add_array("tokenizer.ggml.eos_token_ids", list(eos) or [first])
    writer.add_add_bos_token(c.bos is not None and codec.encode("")[:1] == [c.bos])
    if codec.chat_template is not None:
        writer.add_chat_template(codec.chat_template)


def pre_tokenizer_name(tokenizer: dict[str, Any], name: str) -> str:
    """llama.cpp's name of the pre-tokenizer.

    Raises:
        ValueError: an unknown one.
    """
    stages = tokenizer["pre_tokenizer"] or {}
    stages = stages.get("pretokenizers", [stages])
    kinds = [stage.get("type") for stage in stages]
    if kinds == ["Digits", "ByteLevel"] and stages[0].get("individual_digits"):
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"]:
        pattern = (stages[0].get("pattern") or {}).get("Regex")
        cut = (str(pattern).replace(_PUBLISHED_CONTRACTION, CONTRACTION),)
        for known in _SPLITS:
            if PRE_TOKENIZERS[known].patterns == cut:
                return known
    raise ValueError(
        f"{name}: llama.cpp has no name for its pre-tokenizer ({', '.join(map(str, kinds))}); write a directory"
    )
