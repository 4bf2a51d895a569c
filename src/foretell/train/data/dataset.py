"""Texts to train on, in a folder: sealed shards of tokens and a journal of what came since; a kill at any moment loses
no finished text.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Int
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from foretell.utils.store import SETTINGS_FILE, RunStore, read_records, read_settings, write_synced

SHARD = 1000
"""Texts per shard."""


class Manifest(BaseModel):
    """Whose words a set holds, and how they came about."""

    model_config = ConfigDict(frozen=True)

    model: str
    fingerprint: str
    """Of the model that spoke; of plain text, none."""
    tokenizer: str
    """The tokenizer's identity (`foretell.retrieval.datastore.fingerprint`)."""
    vocab: int
    kind: Literal["self", "prompts", "text"]
    seed: int = 0
    precision: str = "bfloat16"
    greedy_share: float = 1.0
    temperature: float = 1.0
    """Of the answers that are sampled."""
    max_question: int = 0
    max_answer: int = 0
    sources: tuple[str, ...] = ()
    """Files that prompts or texts came from, with the first digits of their hashes."""


class Record(BaseModel):
    """A finished text, or the number of one that was thrown away (no tokens)."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(ge=0, lt=1 << 63)
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
    start: int = Field(ge=0)
    """Tokens from here on are to be learned."""
    greedy: bool = True

    @model_validator(mode="after")
    def _within(self) -> "Record":
        if self.start > len(self.tokens):
            raise ValueError(f"its answer starts at token {self.start} of {len(self.tokens)}")
        return self


@dataclass(frozen=True)
class Document:
    """A text: `tokens[start:]` are to be learned, what stands before is their prompt."""

    tokens: Int[np.ndarray, " t"]
    start: int
    greedy: bool = True


class Collection:
    """A set under construction, held by one process.

    Raises:
        ValueError: another process holds it, or it was begun with other settings.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._store = RunStore(folder, manifest, Record)
        self.folder = folder
        shards = _shards(folder)
        sealed = [_read_shard(f) for f in shards]
        # Not their count: a damaged one may have been deleted from among them.
        self._next_shard = int(shards[-1].stem) + 1 if shards else 0
        self.numbers = {n for s in sealed for n in s["number"].tolist()}
        """Of all texts that are finished or thrown away."""
        # A kill between sealing a shard and clearing the journal leaves texts in both.
        fresh = [r for r in self._store.records if r.number not in self.numbers]
        self.learnable = sum(int((np.diff(s["end"], prepend=0) - s["start"]).sum()) for s in sealed)
        """Tokens to be learned so far."""
        self._pending: list[Record] = []
        for record in fresh:
            self._count(record)
        if len(fresh) < len(self._store.records):
            self._store.clear()
            for record in fresh:
                self._store.append(record)

    def add(self, record: Record) -> None:
        """Keep a text; every `SHARD` of them become a file."""
        self._store.append(record)
        self._count(record)
        if len(self._pending) >= SHARD:
            self.seal()

    def _count(self, record: Record) -> None:
        self._pending.append(record)
        self.numbers.add(record.number)
        self.learnable += len(record.tokens) - record.start

    def seal(self) -> None:
        """Turn the journal into a shard."""
        if self._pending:
            _write_shard(self.folder / f"{self._next_shard:05d}.safetensors", self._pending)
            self._next_shard += 1
            self._pending = []
            self._store.clear()

    def __enter__(self) -> "Collection":
        """Open for the length of a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; what is in the journal stays there."""
        self._store.close()


def _shards(folder: Path) -> list[Path]:
    return sorted(f for f in folder.glob("*.safetensors") if f.stem.isdecimal())


def _write_shard(path: Path, records: Sequence[Record]) -> None:
    arrays: dict[str, np.ndarray] = {
        "number": np.array([r.number for r in records], np.int64),
        "tokens": np.array([t for r in records for t in r.tokens], np.int32),
        "end": np.cumsum([len(r.tokens) for r in records]).astype(np.int64),
        "start": np.array([r.start for r in records], np.int64),
        "greedy": np.array([r.greedy for r in records], np.uint8),
    }
    part = path.with_suffix(".part")
    # Not with `save_file`, which lets nobody but the owner read what it writes.
    write_synced(part, save(arrays))
    os.replace(part, path)


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    try:
        shard = load_file(path)
        _check_shard(shard)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged shard ({error}); delete it, and its texts are made again") from error
    return shard


def _check_shard(shard: dict[str, np.ndarray]) -> None:
    """Check that the arrays of a shard belong together.

    Raises:
        ValueError: they do not.
    """
    for name in ("number", "tokens", "end", "start", "greedy"):
        if name not in shard or shard[name].ndim != 1 or shard[name].dtype.kind not in "iu":
            raise ValueError(f"{name!r} is missing or no list of integers")
    end, start, tokens = shard["end"], shard["start"], shard["tokens"]
    if not len(shard["number"]) == len(end) == len(start) == len(shard["greedy"]):
        raise ValueError("its lists differ in length")
    length = np.diff(end, prepend=0)
    if (length < 0).any() or (end[-1] if len(end) else 0) != len(tokens):
        raise ValueError("its texts do not make up its tokens")
    if (start < 0).any() or (start > length).any() or (tokens < 0).any():
        raise ValueError("a token or a beginning is out of range")


class Dataset(Sequence[Document]):
    """A set read for training, finished or not."""

    def __init__(self, folder: Path, manifest: Manifest, documents: Sequence[Document]) -> None:
        self.folder, self.manifest, self._documents = folder, manifest, documents

    @staticmethod
    def open(folder: Path) -> "Dataset":
        """Read a folder.

        Raises:
            ValueError: there is no set, or it is damaged or empty.
        """
        if not (folder / SETTINGS_FILE).is_file():
            raise ValueError(f"{folder}: no training set here; make one with: foretell data generate --out {folder}")
        manifest = read_settings(folder, Manifest)
        documents, seen = list[Document](), set[int]()
        for shard in map(_read_shard, _shards(folder)):
            seen |= set(shard["number"].tolist())
            documents += _documents(shard)
        for record in read_records(folder, Record):
            if record.number not in seen and record.tokens:
                documents.append(Document(np.array(record.tokens, np.int32), record.start, record.greedy))
        if not documents:
            raise ValueError(f"{folder}: the training set holds no text yet")
        highest = max(int(d.tokens.max()) for d in documents)
        if highest >= manifest.vocab:
            raise ValueError(
                f"{folder}: damaged: it holds token {highest}, and its model has {manifest.vocab}; "
                "make the set again in another folder"
            )
        return Dataset(folder, manifest, documents)

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._documents)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        """A text."""
        return self._documents[i]

    @property
    def tokens(self) -> int:
        """Tokens in all, prompts included."""
        return sum(len(d.tokens) for d in self._documents)

    @property
    def learnable(self) -> int:
        """Tokens to be learned."""
        return sum(len(d.tokens) - d.start for d in self._documents)

    def split(self, held_out: int) -> tuple[list[int], list[int]]:
        """Texts to train on and `held_out` others; which those are depends on the texts alone, so more data never moves
        one into training.

        Raises:
            ValueError: there are not twice as many texts.
        """
        if len(self) < 2 * held_out:
            raise ValueError(
                f"{self.folder}: {len(self)} texts are too few to hold back {held_out} for measuring; make more with "
                f"foretell data generate"
            )
        order = sorted(range(len(self)), key=lambda i: sha256(self[i].tokens.tobytes()).digest())
        return sorted(order[held_out:]), order[:held_out]


def _documents(shard: dict[str, np.ndarray]) -> Iterator[Document]:
    begin = 0
    for end, start, greedy in zip(
        shard["end"].tolist(), shard["start"].tolist(), shard["greedy"].tolist(), strict=True
    ):
        if end > begin:
            yield Document(shard["tokens"][begin:end], start, bool(greedy))
        begin = end
