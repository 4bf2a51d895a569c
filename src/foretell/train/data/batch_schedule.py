"""Assignment of document chunks to training steps; it depends on seed and step alone, so training can resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

_MIN_LEARNED_TOKENS = 8
"""A last chunk of a long document with fewer tokens to learn is left out."""
_MIN_BUCKET, _BUCKET_BATCHES = 256, 32
"""Chunks are sorted by length within buckets of about so many batches, or at least so many chunks."""


class TokenizedDocument(Protocol):
    """A document of a data set; `tokens[start:]` are to be learned."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids."""

    @property
    def start(self) -> int:
        """First token to be learned."""


class DocumentSequence(Protocol):
    """The documents of a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TokenizedDocument: ...


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of documents: chunk `i` is tokens `begin[i] .. end[i]-1` of a document of a data set."""

    dataset: Int[np.ndarray, " n"]
    document: Int[np.ndarray, " n"]
    begin: Int[np.ndarray, " n"]
    end: Int[np.ndarray, " n"]
    num_learned_tokens: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def length(self) -> Int[np.ndarray, " n"]:
        """Tokens of each chunk."""
        return self.end - self.begin


def split_document(length: int, start: int, sequence: int) -> list[tuple[int, int]]:
    """Begin and end of consecutive chunks of at most `sequence` tokens that cover all tokens to be learned.

    The first chunk also holds part of the prompt.
    """
    if length <= sequence:
        return [(0, length)]
    first = 0 if start < sequence * 3 // 4 else start - sequence // 4
    return [
        (b, min(b + sequence, length))
        for b in range(first, length, sequence)
        if b == first or length - max(b, start) >= _MIN_LEARNED_TOKENS
    ]


def split_documents(
    datasets: Sequence[DocumentSequence], indices: Sequence[Sequence[int]], sequence: int
) -> ChunkTable:
    """Chunks of the documents at `indices` of every data set; documents without tokens to learn are left out."""
    rows = []
    for d, (documents, chosen) in enumerate(zip(datasets, indices, strict=True)):
        for i in chosen:
            document = documents[i]
            # The first token of a sequence cannot be predicted.
            length, start = len(document.tokens), max(document.start, 1)
            chunks = split_document(length, start, sequence)
            rows += [(d, i, b, e, e - max(b, start)) for b, e in chunks if e > max(b, start)]
    table = np.array(rows, np.int64).reshape(-1, 5)
    return ChunkTable(*(np.ascontiguousarray(c) for c in table.T))


@dataclass(frozen=True)
class BatchingConfig:
    """How chunks become batches."""

    seed: int
    batch_tokens: int
    accumulate: int
    """Batches per step."""
    dataset_weights: tuple[float, ...]
    """How often an epoch shows each document of a data set."""


BatchRows = list[Int[np.ndarray, " b"]]
"""Batches, each as rows of the `ChunkTable`."""


class BatchSchedule:
    """The batches of every training step, epoch after epoch."""

    def __init__(self, chunks: ChunkTable, config: BatchingConfig) -> None:
        self.chunks, self._config = chunks, config
        self._epoch_ends: list[int] = []
        self._cached_epoch: tuple[int, list[BatchRows]] | None = None

    def batches(self, step: int) -> BatchRows:
        """The batches of a step (counted from 0)."""
        epoch = 0
        while self._epoch_end(epoch) <= step:
            epoch += 1
        return self._epoch_steps(epoch)[step - (self._epoch_ends[epoch - 1] if epoch else 0)]

    def num_steps(self, epochs: float) -> int:
        """Steps of so many epochs, at least one."""
        full = int(epochs)
        before = self._epoch_end(full - 1) if full else 0
        part = round((epochs - full) * len(self._epoch_steps(full))) if epochs > full else 0
        return max(before + part, 1)

    def _epoch_end(self, epoch: int) -> int:
        while len(self._epoch_ends) <= epoch:
            before = self._epoch_ends[-1] if self._epoch_ends else 0
            self._epoch_ends.append(before + len(self._epoch_steps(len(self._epoch_ends))))
        return self._epoch_ends[epoch]

    def _epoch_steps(self, epoch: int) -> list[BatchRows]:
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            batches = epoch_batches(self.chunks, self._config, epoch)
            n = self._config.accumulate
            self._cached_epoch = epoch, [batches[i : i + n] for i in range(0, len(batches), n)]
        return self._cached_epoch[1]


def epoch_batches(chunks: ChunkTable, config: BatchingConfig, epoch: int) -> BatchRows:
    """The batches of an epoch in random order: chunks of similar length together, at most `batch_tokens` each."""
    rng = np.random.default_rng([config.seed, epoch])
    weight = np.array(config.dataset_weights)[chunks.dataset]
    times = weight.astype(np.int64) + (rng.random(len(chunks)) < weight % 1)
    rows = np.repeat(np.arange(len(chunks)), times)
    rng.shuffle(rows)
    longest = int(chunks.length.max())
    bucket = max(_MIN_BUCKET, _BUCKET_BATCHES * config.batch_tokens // longest)
    batches: BatchRows = []
    for i in range(0, len(rows), bucket):
        batches += _pack(rows[i : i + bucket], chunks.length, config.batch_tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


def _pack(rows: Int[np.ndarray, " k"], length: Int[np.ndarray, " n"], batch_tokens: int) -> BatchRows:
    """Batches of the rows, longest first, each of at most `batch_tokens` padded tokens or a single row."""
    rows = rows[np.argsort(-length[rows], kind="stable")]
    batches, i = [], 0
    while i < len(rows):
        count = max(batch_tokens // int(length[rows[i]]), 1)
        batches.append(rows[i : i + count])
        i += count
    return batches
