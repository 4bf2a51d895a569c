"""Small vocabularies in GGUF files."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = {
    "<unk>": UNKNOWN,
    "<s>": CONTROL,
    "</s>": CONTROL,
    "<pad>": CONTROL,
    "<|user|>": CONTROL,
    "<tool>": USER_DEFINED,
    "<|endoftext|>": CONTROL,
}
"""Added tokens, and their types."""


def merged(texts: Sequence[str], raw: bool, size: int = 1800) -> tuple[list[str], list[str]]:
    """Tokens and merges of a BPE trained on texts that are not cut into words, so that every cut at another place gives
    other tokens. `raw`: of characters and not of bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    if raw:
        lines = [line.replace(" ", "▁") for text in texts for line in text.split("\n")]
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        lines = list(texts)
        trainer = trainers.BpeTrainer(
            vocab_size=size, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        )
    tokenizer.train_from_iterator([line for line in lines for _ in range(2)], trainer)
    vocab = tokenizer.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return sorted(vocab, key=lambda token: vocab[token]), merges


def with_special(tokens: Sequence[str], byte_tokens: bool) -> tuple[list[str], list[int]]:
    """The tokens after the added ones, and all types."""
    single = [f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []
    names = [*SPECIAL, *single, *tokens]
    return names, [*SPECIAL.values(), *(BYTE for _ in single), *(NORMAL for _ in tokens)]


def sentencepiece(texts: Sequence[str], unigram: bool) -> dict[str, Any]:
    """A vocabulary of pieces with scores, no two of which are equal: those of a BPE, earlier merges first, with a token
    per byte for other characters; or, `unigram`, frequent pieces of up to four characters.
    """
    if unigram:
        counts: Counter[str] = Counter()
        for text in texts:
            line = "▁" + text.replace(" ", "▁")
            counts.update(line[i : i + size] for size in (1, 2, 3, 4) for i in range(len(line) - size + 1))
        ranked = sorted(counts.items(), key=lambda item: (-item[1] * len(item[0]), item[0]))
        pieces = [piece for piece, count in ranked if count > 1][:900]
    else:
        pieces, _ = merged(texts, raw=True)
    names, types = with_special([p for p in pieces if p not in SPECIAL and "\0" not in p], not unigram)
    scores = [-i / 128 - 1 if kind == NORMAL else 0.0 for i, kind in enumerate(types)]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"tokens": names, "token_type": types, "scores": scores, **ids}


def write_vocabulary(path: Path, meta: Mapping[str, Any]) -> None:
    """Write a model of zeros with a vocabulary: `meta` are the keys below `tokenizer.ggml.`, and `general.name`."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = dict.fromkeys(("embedding_length", "feed_forward_length", "context_length"), 64)
    for key, value in (numbers | {"block_count": 1, "attention.head_count": 4, "rope.dimension_count": 16}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("llama.vocab_size", len(meta["tokens"]))
    for key, value in meta.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, value)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (len(meta["tokens"]), 64), "output_norm": (64,)}
    shapes |= {f"blk.0.{name}": (64, 64) for name in square} | {"blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
