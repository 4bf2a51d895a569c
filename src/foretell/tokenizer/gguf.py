"""The tokenizer that a GGUF file describes."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from foretell.tokenizer.byte_level import split_by
from foretell.tokenizer.codec import TextCodec

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF files."""


def codec_from_gguf(meta: Mapping[str, Any]) -> TextCodec:
    """The tokenizer that the metadata of a GGUF file describes: byte-level BPE (`gpt2`) or SentencePiece (`llama`).

    Raises:
        ValueError: another kind of tokenizer, or a damaged one.
    """
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"GGUF tokenizer {kind!r} is not supported; known: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    try:
        return _build_codec(meta)
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer in this GGUF file is damaged ({type(error).__name__}: {reason}); download the file again"
        ) from error


def _build_codec(meta: Mapping[str, Any]) -> TextCodec:
    tokens: list[str] = list(meta["tokenizer.ggml.tokens"])
    types: list[int] = list(meta.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    vocab = {t: i for i, t in enumerate(tokens)}
    if meta["tokenizer.ggml.model"] == "gpt2":
        merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=meta.get("tokenizer.ggml.pre") == "llama-bpe")
        )
        tokenizer.pre_tokenizer = _pre_tokenizer(str(meta.get("tokenizer.ggml.pre", "default")))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = _sentencepiece(
            tokens, list(meta["tokenizer.ggml.scores"]), int(meta.get("tokenizer.ggml.unknown_token_id", 0))
        )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )

    def token(name: str) -> str | None:
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[int(index)]

    bos = token("bos")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", False):
        first = (bos, int(meta["tokenizer.ggml.bos_token_id"]))
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos}:0 $A:0", f"{bos}:0 $A:0 $B:0", [first])
    return TextCodec(tokenizer, meta.get("tokenizer.chat_template"), bos, token("eos"))


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind in ("default", "gpt-2"):
        return byte_level
    return split_by(kind)


def _sentencepiece(tokens: list[str], scores: list[float], unknown: int) -> Tokenizer:
    """SentencePiece BPE: every pair that forms a known piece merges, higher scores first."""
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], left, right))
    merges.sort(key=lambda m: (m[0], m[1]))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(m[2], m[3]) for m in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
