"""Reads documents from text files, JSON lines and directories, and tokenizes them."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt32

from foretell.tokenizer.codec import TextCodec
from foretell.utils.validation import parse_json


class NotTextError(ValueError):
    """A file that is not UTF-8."""


_PIECE_CHARACTERS = 1 << 17
"""Most characters of a piece. Longer documents are cut after a line, so that several cores tokenize one document."""
_BATCH_PIECES = 64
"""Pieces that are tokenized together."""


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files, and the files below the directories in alphabetical order without hidden ones.

    Raises:
        ValueError: a path does not exist.
    """
    out = list[Path]()
    for path in paths:
        if path.is_dir():
            below = (
                f for f in sorted(path.rglob("*")) if not any(p.startswith(".") for p in f.relative_to(path).parts)
            )
            out += [f for f in below if f.is_file()]
        elif path.is_file():
            out.append(path)
        else:
            raise ValueError(f"{path}: no such file or directory")
    return out


def read_documents(file: Path) -> Iterator[str]:
    """The documents of a file: its text; of a `.jsonl` file the field `text` of every line, else all its strings.

    Raises:
        NotTextError: the file is not UTF-8.
        ValueError: a line is not JSON.
    """
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise NotTextError(f"{file}: not UTF-8 text (byte {error.start}); convert it or leave it out") from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _field(f"{file}, line {number}", line)


def _field(where: str, line: str) -> str:
    value = parse_json(line, where)
    return str(value["text"]) if isinstance(value, dict) and "text" in value else "\n".join(_strings(value))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def tokenize_documents(texts: Iterable[str], codec: TextCodec) -> Iterator[UInt32[np.ndarray, " _"]]:
    """Token ids of every document; several are tokenized together."""
    pieces, ends = list[str](), list[bool]()
    document = list[UInt32[np.ndarray, " _"]]()
    for text in texts:
        cut = _split(text)
        pieces += cut
        ends += [False] * (len(cut) - 1) + [True]
        if len(pieces) >= _BATCH_PIECES:
            yield from _encode(pieces, ends, codec, document)
            pieces, ends = [], []
    yield from _encode(pieces, ends, codec, document)


def _split(text: str) -> list[str]:
    out, start = list[str](), 0
    while len(text) - start > _PIECE_CHARACTERS:
        line = text.rfind("\n", start, start + _PIECE_CHARACTERS)
        end = line + 1 if line >= start else start + _PIECE_CHARACTERS
        out.append(text[start:end])
        start = end
    return [*out, text[start:]]


def _encode(
    pieces: list[str], ends: list[bool], codec: TextCodec, document: list[UInt32[np.ndarray, " _"]]
) -> Iterator[UInt32[np.ndarray, " _"]]:
    """Tokenize pieces and yield complete documents; `document` keeps the pieces of an incomplete one."""
    for encoding, last in zip(codec.tokenizer.encode_batch_fast(pieces, add_special_tokens=False), ends, strict=True):
        document.append(np.array(encoding.ids, np.uint32))
        if last:
            yield np.concatenate(document)
            document.clear()
