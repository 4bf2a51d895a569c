"""The tokenizer that a GGUF file describes; where the file is silent, with the defaults of llama.cpp."""

import os
from collections.abc import Mapping
from typing import Any

from foretell.tokenizer.codec import TextCodec
from foretell.tokenizer.pre_tokenizers import VARIABLE, PreTokenizer, pre_tokenizer
from foretell.tokenizer.vocabulary import PREFIX, Vocabulary

_KINDS = {
    "gpt2": "byte-level BPE",
    "gemma4": "BPE of characters",
    "llama": "SentencePiece",
    "t5": "unigram of SentencePiece",
}
_NOT_READ = {
    "bert": "WordPiece, of models that embed texts",
    "rwkv": "the tokenizer of RWKV",
    "plamo2": "the tokenizer of PLaMo 2",
    "whitespace": "words, of models that embed texts",
    "hybriddna": "a tokenizer of DNA",
    "none": "a file without a tokenizer",
    "no_vocab": "a file without a tokenizer",
}
_OTHER_SPECIAL = {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask", "cls": "cls"}
"""Names of further special tokens in GGUF files (the format spells so), by those in templates."""


def codec_from_gguf(meta: Mapping[str, Any], pre: str | None = None) -> TextCodec:
    """The tokenizer that the metadata of a GGUF file describes. `pre`: the pre-tokenizer of a byte-level BPE, in place
    of the one that the file names.

    Raises:
        ValueError: another kind of tokenizer, an unknown pre-tokenizer, or a damaged one.
    """
    rule = check_tokenizer(meta, pre)
    try:
        return _codec(meta, Vocabulary(meta, rule))
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer in this GGUF file is damaged ({type(error).__name__}: {reason}); download the file again"
        ) from error


def check_tokenizer(meta: Mapping[str, Any], pre: str | None = None) -> PreTokenizer | None:
    """How the tokenizer of a GGUF file cuts texts; None: it does not. `pre`: as `codec_from_gguf` takes it.

    Raises:
        ValueError: another kind of tokenizer, or an unknown pre-tokenizer.
    """
    kind = meta.get(PREFIX + "model")
    if kind not in _KINDS:
        what = f" ({_NOT_READ[kind]})" if kind in _NOT_READ else ""
        known = ", ".join(f"{name} ({text})" for name, text in _KINDS.items())
        raise ValueError(f"GGUF tokenizer {kind!r}{what} is not supported; known: {known}")
    return _rule(meta, pre)


def _rule(meta: Mapping[str, Any], pre: str | None) -> PreTokenizer | None:
    """The pre-tokenizer of a BPE; None: another kind of tokenizer has none."""
    if meta[PREFIX + "model"] in ("llama", "t5"):
        if pre is not None:
            raise ValueError(
                f"--pre-tokenizer {pre}: this GGUF file has a SentencePiece tokenizer, which cuts no texts"
            )
        return None
    named = "gemma4" if meta[PREFIX + "model"] == "gemma4" else str(meta.get(PREFIX + "pre") or "default")
    return pre_tokenizer(pre or os.environ.get(VARIABLE) or named)


def _codec(meta: Mapping[str, Any], vocabulary: Vocabulary) -> TextCodec:
    tokenizer = vocabulary.tokenizer(normalizes=False)
    vocabulary.add_ends(tokenizer)
    prefix, tokens = "tokenizer.chat_template.", vocabulary.tokens
    return TextCodec(
        tokenizer,
        meta.get("tokenizer.chat_template"),
        vocabulary.name("bos"),
        vocabulary.name("eos"),
        {key.removeprefix(prefix): text for key, text in meta.items() if key.startswith(prefix)},
        {
            f"{name}_token": tokens[number]
            for name, key in _OTHER_SPECIAL.items()
            if 0 <= (number := int(meta.get(f"{PREFIX}{key}_token_id", -1))) < len(tokens)
        },
    )
