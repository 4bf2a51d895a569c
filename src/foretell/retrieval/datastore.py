"""The datastore of retrieval-based drafting: a corpus of tokens with its suffix array, on disk and memory-mapped."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt32
from pydantic import Field

from foretell.retrieval.suffix_array import SEPARATOR, build_suffix_array
from foretell.tokenizer.codec import TextCodec
from foretell.utils.paths import require_empty
from foretell.utils.unfinished import whole
from foretell.utils.validation import FrozenModel, read_model

DEFAULT_DEPTH = 16
"""Tokens of the longest n-gram that can be looked up, by default."""
_FORMAT = "foretell datastore 1"
_PROBE = "The quick brown fox:\n\tfor i in range(1024):  # naïve café, 東京 🙂\r\n    don't()"


class Manifest(FrozenModel):
    """The description of a datastore in its directory."""

    format: str
    tokens: int
    """Number of tokens with separators."""
    documents: int
    depth: int = Field(ge=1)
    """Suffixes are sorted by their first `depth` tokens at least."""
    tokenizer: str
    """Reference of the model whose tokenizer was used; for messages."""
    fingerprint: str
    """`tokenizer_fingerprint` of that tokenizer."""


class Datastore:
    """The tokens of all documents, with a separator after each, and their suffix array (Manber & Myers 1993), sorted by
    the first `depth` tokens.
    """

    def __init__(
        self, tokens: UInt32[np.ndarray, " t"], order: UInt32[np.ndarray, " t"], depth: int = DEFAULT_DEPTH
    ) -> None:
        # A plain array over the memory map: slicing `np.memmap` takes twice as long.
        self._tokens, self._suffixes = np.asarray(tokens), np.asarray(order)
        self.depth = depth

    @staticmethod
    def from_documents(documents: Iterable[Sequence[int]], depth: int = DEFAULT_DEPTH) -> "Datastore":
        """Index documents in memory."""
        tokens = join_documents(np.asarray(d, np.uint32) for d in documents)
        return Datastore(tokens, build_suffix_array(tokens, depth), depth)

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """The range (first, last + 1) in the suffix array of the suffixes that begin with `pattern`, of at most `depth`
        tokens.
        """
        pattern, size = list(pattern), len(pattern)

        def prefix(index: int) -> list[int]:
            start = int(self._suffixes[index])
            out: list[int] = self._tokens[start : start + size].tolist()
            return out

        indices = range(len(self._suffixes))
        first = bisect_left(indices, pattern, key=prefix)
        return first, bisect_right(indices, pattern, lo=first, key=prefix)

    def longest_suffix(
        self, context: Sequence[int], max_size: int, min_size: int, min_count: int = 1
    ) -> tuple[int, int, int]:
        """Size of the longest suffix of `context` that occurs `min_count` times or more, and its range as `find` gives
        it; zeros if there is none.
        """
        best, low, high = (0, 0, 0), min_size, min(max_size, self.depth, len(context))
        # A suffix occurs no more often than a shorter one, so that binary search finds the size.
        while low <= high:
            size = (low + high + 1) // 2
            first, last = self.find(context[len(context) - size :])
            if last - first >= min_count:
                best, low = (size, first, last), size + 1
            else:
                high = size - 1
        return best

    def continuations(self, first: int, last: int, size: int, length: int, max_count: int) -> Int[np.ndarray, "h c"]:
        """The `length` tokens after the first `size` of each suffix in the range, -1 after the end of its document.

        Of more than `max_count` suffixes, `max_count` at equal distances are used.
        """
        indices = np.arange(first, last)
        if len(indices) > max_count:
            indices = indices[np.linspace(0, len(indices) - 1, max_count).astype(np.int64)]
        position = self._suffixes[indices].astype(np.int64)[:, None] + size + np.arange(length)
        out = self._tokens[np.minimum(position, len(self._tokens) - 1)]
        return np.where(np.logical_or.accumulate(out == SEPARATOR, 1), -1, out.astype(np.int64))


def join_documents(documents: Iterable[UInt32[np.ndarray, " _"]]) -> UInt32[np.ndarray, " t"]:
    """Concatenate documents, with a separator after each; empty ones are left out."""
    end = np.full(1, SEPARATOR)
    parts = [part for d in documents if len(d) for part in (d, end)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def tokenizer_fingerprint(codec: TextCodec) -> str:
    """A hash of a tokenizer's vocabulary and of the token ids of a probe text.

    It is equal for the GGUF file and the tokenizer.json of one model.
    """
    vocabulary = sorted((i, t) for t, i in codec.tokenizer.get_vocab(with_added_tokens=True).items())
    return sha256(json.dumps([vocabulary, codec.encode(_PROBE, add_special_tokens=False)]).encode()).hexdigest()


def write_datastore(
    out: Path,
    documents: Iterable[UInt32[np.ndarray, " _"]],
    codec: TextCodec,
    tokenizer: str,
    depth: int = DEFAULT_DEPTH,
) -> Manifest:
    """Index documents and write the datastore to the directory `out`, which is created only when it is complete.

    Raises:
        ValueError: `out` is not new or empty, or there is nothing to index.
    """
    require_empty(out)
    count = 0

    def counted() -> Iterable[UInt32[np.ndarray, " _"]]:
        nonlocal count
        for d in documents:
            count += bool(len(d))
            yield d

    tokens = join_documents(counted())
    if not len(tokens):
        raise ValueError("there is nothing to index: the files contain no text")
    manifest = Manifest(
        format=_FORMAT,
        tokens=len(tokens),
        documents=count,
        depth=depth,
        tokenizer=tokenizer,
        fingerprint=tokenizer_fingerprint(codec),
    )
    with whole(out) as unfinished:
        unfinished.mkdir()
        np.save(unfinished / "tokens.npy", tokens)
        np.save(unfinished / "suffixes.npy", build_suffix_array(tokens, depth))
        (unfinished / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of the datastore in this directory.

    Raises:
        ValueError: it is no datastore, or its manifest is damaged.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise ValueError(
            f"{path}: no datastore here; make one with: foretell datastore build FILES... --tokenizer REF --out {path}"
        )
    manifest = read_model(Manifest, file, "build the datastore again")
    if manifest.tokens < 1:
        raise ValueError(f"{path}: the datastore is empty; build it again from files with text")
    if manifest.format != _FORMAT:
        raise ValueError(
            f"{file}: format {manifest.format!r} was expected to be {_FORMAT!r}; build the datastore again"
        )
    return manifest


def open_datastore(path: Path, codec: TextCodec | None = None) -> Datastore:
    """Map a datastore into memory, for a target with the tokenizer of `codec`.

    Raises:
        ValueError: there is none, a file is damaged, or it was built with another tokenizer.
    """
    manifest = read_manifest(path)
    if codec is not None and manifest.fingerprint != tokenizer_fingerprint(codec):
        raise ValueError(
            f"{path}: built with the tokenizer of {manifest.tokenizer}, which is not the target's; build one with "
            f"--tokenizer TARGET"
        )
    tokens, order = (_mapped(path / name, manifest.tokens) for name in ("tokens.npy", "suffixes.npy"))
    return Datastore(tokens, order, manifest.depth)


def _mapped(file: Path, length: int) -> UInt32[np.ndarray, " t"]:
    try:
        out: np.ndarray = np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file}: missing or damaged ({error}); build the datastore again") from error
    if out.dtype != np.uint32 or out.shape != (length,):
        raise ValueError(
            f"{file}: {length} tokens of 32 bits were expected, found {out.shape} of {out.dtype}; build the datastore "
            f"again"
        )
    return out
