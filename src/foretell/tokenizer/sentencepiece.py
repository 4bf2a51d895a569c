"""Reads `tokenizer.model` of SentencePiece, a message of protocol buffers."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from foretell.tokenizer.vocabulary import PREFIX, Vocabulary

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _KIND = 1, 2, 3
"""Fields of a piece."""
_MODEL_TYPE, _UNKNOWN = 3, 40
"""Fields of the trainer's settings."""
_CHARSMAP, _ADD_PREFIX, _REMOVE_EXTRA = 2, 3, 4
"""Fields of the normalizer's settings."""
_MODEL_KINDS = {1: "t5", 2: "llama"}
"""Names in GGUF files of the kinds of models: unigram and BPE."""
_VARINT, _WIDE, _BYTES, _NARROW = 0, 1, 2, 5
"""How values are written."""


def is_sentencepiece(file: Path) -> bool:
    """Whether a file looks like a model of SentencePiece: it begins with a piece (files of tiktoken are lines)."""
    return file.read_bytes()[:1] == bytes([_PIECES << 3 | _BYTES])


def read_sentencepiece(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.model`.

    Raises:
        ValueError: it is damaged, or of another kind than unigram and BPE.
    """
    try:
        pieces = list[dict[int, Any]]()
        settings: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
        for number, value in _fields(file.read_bytes()):
            if number == _PIECES:
                pieces.append(dict(_fields(value)))
            elif number in settings:
                settings[number] = dict(_fields(value))
        trainer, normalizer = settings[_TRAINER], settings[_NORMALIZER]
        kind = _MODEL_KINDS.get(trainer.get(_MODEL_TYPE, 1))
        meta = {
            "model": kind,
            "tokens": [piece[_PIECE].decode() for piece in pieces],
            "scores": [struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0] for piece in pieces],
            "token_type": [piece.get(_KIND, 1) for piece in pieces],
            "unknown_token_id": trainer.get(_UNKNOWN, 0),
            "precompiled_charsmap": list(normalizer.get(_CHARSMAP, b"")),
            "add_space_prefix": normalizer.get(_ADD_PREFIX, True),
            "remove_extra_whitespaces": normalizer.get(_REMOVE_EXTRA, True),
            "add_bos_token": False,
            "add_eos_token": False,
        }
        if kind is not None:
            described = {PREFIX + key: value for key, value in meta.items()}
            return Vocabulary(described, None).tokenizer(normalizes=True)
    except Exception as error:  # Bytes that are no message, and what tokenizers raises.
        raise ValueError(f"{file}: damaged SentencePiece model ({type(error).__name__}); download it again") from error
    raise ValueError(f"{file}: only unigram and BPE models of SentencePiece are read; save it as tokenizer.json")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if kind == _BYTES else ({_WIDE: 8, _NARROW: 4}[kind], at)
        if at + size > len(data):
            raise ValueError("it ends within a value")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
