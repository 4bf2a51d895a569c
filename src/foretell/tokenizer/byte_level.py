"""Byte-level BPE of Qwen2 from `vocab.json` and `merges.txt`, for checkpoints without a `tokenizer.json` (Dream)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from foretell.tokenizer.pre_tokenizers import PRE_TOKENIZERS, split_by
from foretell.utils.validation import Fields, read_json

_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer")
"""Values of `tokenizer_class` whose texts are cut as Qwen2's."""
_VOCAB, _MERGES = "vocab.json", "merges.txt"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_AGAIN = "download it again"


def is_qwen2(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a directory holds such a tokenizer; `config`: its `tokenizer_config.json`."""
    return config.get("tokenizer_class") in _CLASSES and all((folder / name).is_file() for name in (_VOCAB, _MERGES))


def read_qwen2(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a directory.

    Raises:
        ValueError: a file is damaged, or an added token has another number than the configuration says.
    """
    try:
        model = models.BPE.from_file(str(folder / _VOCAB), str(folder / _MERGES))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder}: damaged {_VOCAB} or {_MERGES} ({error}); {_AGAIN}") from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_by(PRE_TOKENIZERS["qwen2"])
    tokenizer.decoder = decoders.ByteLevel()
    for number, token in sorted(_added_tokens(folder, config).items()):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: {token.content} should be token {number}, and after {_VOCAB} it "
                f"is {tokenizer.token_to_id(token.content)}; {_AGAIN}"
            )
    return tokenizer


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """By number; files of older versions name them in `added_tokens.json` only."""
    fields, out = Fields(config, str(folder / "tokenizer_config.json")), dict[int, AddedToken]()
    decoder = fields.fields("added_tokens_decoder")
    for key in decoder.raw:
        token = decoder.fields(key)
        if not key.isdecimal():
            raise decoder.wrong(key, "a number", key)
        flags = {flag: token.flag(flag, default=False) for flag in _FLAGS}
        out[int(key)] = AddedToken(token.text("content"), **flags)
    file = folder / "added_tokens.json"
    if not out and file.is_file():
        added = Fields(read_json(file, _AGAIN), str(file))
        out = {added.integer(text): AddedToken(text, normalized=False, special=True) for text in added.raw}
    return out
