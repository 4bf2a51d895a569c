"""Data sets of tokenized documents: a folder of shards and a journal of the documents since the last shard.

An interrupted run loses no finished document.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from jaxtyping import Int
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from foretell.api import Model
from foretell.retrieval.datastore import tokenizer_fingerprint
from foretell.utils.store import SETTINGS_FILE, RunStore, read_records, read_settings, write_synced

DOCUMENTS_PER_SHARD = 1000
"""Size of a shard."""


class DatasetManifest(BaseModel):
    """How a data set was made. Written to `settings.json`; a set is continued with equal settings only."""

    model_config = ConfigDict(frozen=True)

    model: str
    fingerprint: str
    """Of the model that wrote the answers; empty for plain text."""
    tokenizer: str
    """The tokenizer's identity (`foretell.retrieval.datastore.tokenizer_fingerprint`)."""
    vocab: int
    kind: Literal["self", "prompts", "text"]
    seed: int = 0
    precision: str = "bfloat16"
    greedy_share: float = 1.0
    temperature: float = 1.0
    """Of the answers that are not greedy."""
    max_question: int = 0
    """Longest generated prompt, in tokens; 0 where prompts are given."""
    max_answer: int = 0
    sources: tuple[str, ...] = ()
    """Files of prompts or plain text, each with the first digits of its SHA-256."""

    @classmethod
    def of(cls, model: Model, kind: Literal["self", "prompts", "text"], **settings: Any) -> Self:
        """Of documents for a model, which writes their answers unless they are plain text; `settings`: other fields."""
        return cls(
            model=model.name,
            fingerprint="" if kind == "text" else model.checkpoint.fingerprint(),
            tokenizer=tokenizer_fingerprint(model.codec),
            vocab=model.config.vocab,
            kind=kind,
            **settings,
        )


class DocumentRecord(BaseModel):
    """A document in the journal; without tokens: the number of a document that was discarded."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(ge=0, lt=1 << 63)
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
    start: int = Field(ge=0)
    """First token to be learned."""
    greedy: bool = True

    @model_validator(mode="after")
    def _within(self) -> "DocumentRecord":
        if self.start > len(self.tokens):
            raise ValueError(f"its answer starts at token {self.start} of {len(self.tokens)}")
        return self


@dataclass(frozen=True)
class Document:
    """Tokens `tokens[:start]` are the prompt, tokens `tokens[start:]` are to be learned."""

    tokens: Int[np.ndarray, " t"]
    start: int
    greedy: bool = True


class DatasetWriter:
    """Adds documents to a data set; one process at a time.

    Raises:
        ValueError: another process writes to the folder, or its data set has other settings.
    """

    def __init__(self, folder: Path, manifest: DatasetManifest) -> None:
        self._store = RunStore(folder, manifest, DocumentRecord)
        self.folder = folder
        shards = _shard_paths(folder)
        sealed = [_read_shard(f) for f in shards]
        # Not the number of shards: a damaged one may have been deleted.
        self._next_shard = int(shards[-1].stem) + 1 if shards else 0
        self.known_numbers = {n for s in sealed for n in s["number"].tolist()}
        """Numbers of all documents that were finished or discarded."""
        # A run that is killed after writing a shard and before clearing the journal leaves documents in both.
        fresh = [r for r in self._store.records if r.number not in self.known_numbers]
        self.num_learned_tokens = sum(int((np.diff(s["end"], prepend=0) - s["start"]).sum()) for s in sealed)
        """Tokens to be learned so far."""
        self._pending: list[DocumentRecord] = []
        for record in fresh:
            self._count(record)
        if len(fresh) < len(self._store.records):
            self._store.clear()
            for record in fresh:
                self._store.append(record)

    def add(self, record: DocumentRecord) -> None:
        """Append a document to the journal; write a shard when there are `DOCUMENTS_PER_SHARD`."""
        self._store.append(record)
        self._count(record)
        if len(self._pending) >= DOCUMENTS_PER_SHARD:
            self.seal()

    def add_shard(self, records: Sequence[DocumentRecord]) -> None:
        """Write documents that were finished together as a shard, with those of the journal."""
        for record in records:
            self._count(record)
        self.seal()

    def _count(self, record: DocumentRecord) -> None:
        self._pending.append(record)
        self.known_numbers.add(record.number)
        self.num_learned_tokens += len(record.tokens) - record.start

    def seal(self) -> None:
        """Write the documents of the journal as a shard, and clear the journal."""
        if self._pending:
            _write_shard(self.folder / f"{self._next_shard:05d}.safetensors", self._pending)
            self._next_shard += 1
            self._pending = []
            self._store.clear()

    def __enter__(self) -> "DatasetWriter":
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder; documents in the journal stay there."""
        self._store.close()


def _shard_paths(folder: Path) -> list[Path]:
    return sorted(f for f in folder.glob("*.safetensors") if f.stem.isdecimal())


def _write_shard(path: Path, records: Sequence[DocumentRecord]) -> None:
    arrays: dict[str, np.ndarray] = {
        "number": np.array([r.number for r in records], np.int64),
        "tokens": np.array([t for r in records for t in r.tokens], np.int32),
        "end": np.cumsum([len(r.tokens) for r in records]).astype(np.int64),
        "start": np.array([r.start for r in records], np.int64),
        "greedy": np.array([r.greedy for r in records], np.uint8),
    }
    part = path.with_suffix(".part")
    # `save_file` makes files that only their owner can read.
    write_synced(part, save(arrays))
    os.replace(part, path)


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    try:
        shard = load_file(path)
        _check_shard(shard)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path}: damaged shard ({error}); delete it, and its documents are generated again"
        ) from error
    return shard


def _check_shard(shard: dict[str, np.ndarray]) -> None:
    """Check the arrays of a shard.

    Raises:
        ValueError: an array is missing, has the wrong type or length, or holds a value out of range.
    """
    for name in ("number", "tokens", "end", "start", "greedy"):
        if name not in shard or shard[name].ndim != 1 or shard[name].dtype.kind not in "iu":
            raise ValueError(f"{name!r} is missing or not a list of integers")
    end, start, tokens = shard["end"], shard["start"], shard["tokens"]
    if not len(shard["number"]) == len(end) == len(start) == len(shard["greedy"]):
        raise ValueError("its lists differ in length")
    length = np.diff(end, prepend=0)
    if (length < 0).any() or (end[-1] if len(end) else 0) != len(tokens):
        raise ValueError("its documents do not add up to its tokens")
    if (start < 0).any() or (start > length).any() or (tokens < 0).any():
        raise ValueError("a token or a start is out of range")


class Dataset(Sequence[Document]):
    """A data set opened for reading; it may still be incomplete."""

    def __init__(self, folder: Path, manifest: DatasetManifest, documents: Sequence[Document]) -> None:
        self.folder, self.manifest, self._documents = folder, manifest, documents

    @staticmethod
    def open(folder: Path) -> "Dataset":
        """Read all documents of a folder.

        Raises:
            ValueError: the folder holds no data set, or a damaged or an empty one.
        """
        if not (folder / SETTINGS_FILE).is_file():
            raise ValueError(f"{folder}: no training set here; make one with: foretell data generate --out {folder}")
        manifest = read_settings(folder, DatasetManifest)
        documents, seen = list[Document](), set[int]()
        for shard in map(_read_shard, _shard_paths(folder)):
            seen |= set(shard["number"].tolist())
            documents += _documents(shard)
        for record in read_records(folder, DocumentRecord):
            if record.number not in seen and record.tokens:
                documents.append(Document(np.array(record.tokens, np.int32), record.start, record.greedy))
        if not documents:
            raise ValueError(f"{folder}: the training set holds no document yet")
        highest = max(int(d.tokens.max()) for d in documents)
        if highest >= manifest.vocab:
            raise ValueError(
                f"{folder}: damaged: it holds token {highest}, and its model has {manifest.vocab}; "
                "generate the set again in another folder"
            )
        return Dataset(folder, manifest, documents)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._documents)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        """A document."""
        return self._documents[i]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, prompts included."""
        return sum(len(d.tokens) for d in self._documents)

    @property
    def num_learned_tokens(self) -> int:
        """Tokens to be learned, of all documents."""
        return sum(len(d.tokens) - d.start for d in self._documents)

    def split(self, held_out: int) -> tuple[list[int], list[int]]:
        """Indices of the documents to train on, and of `held_out` others.

        The documents with the smallest hashes are held out, whatever their order in the data set is.

        Raises:
            ValueError: there are fewer than twice `held_out` documents.
        """
        if len(self) < 2 * held_out:
            raise ValueError(
                f"{self.folder}: {len(self)} documents are too few to hold out {held_out} for measuring; make more "
                f"with foretell data generate"
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
