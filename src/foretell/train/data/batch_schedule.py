"""Which pieces of which documents every step sees: a function of seed and step, so that a training can be resumed
anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

_MIN_LEARNED_TOKENS = 8
"""Fewest tokens to be learned that make a piece at the end of a long document worth showing."""


class TokenizedDocument(Protocol):
    """A document as data sets give it; `tokens[start:]` are to be learned."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids."""

    @property
    def start(self) -> int:
        """First token to be learned."""


class DocumentSequence(Protocol):
    """A data set, as far as the order of its documents goes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TokenizedDocument: ...


@dataclass(frozen=True)
class ChunkTable:
    """Pieces of documents, one a row: tokens `begin .. end-1` of a document of a data set."""

    dataset: Int[np.ndarray, " n"]
    document: Int[np.ndarray, " n"]
    begin: Int[np.ndarray, " n"]
    end: Int[np.ndarray, " n"]
    num_learned_tokens: Int[np.ndarray, " n"]
    """Tokens to be learned."""

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def length(self) -> Int[np.ndarray, " n"]:
        """Tokens of each."""
        return self.end - self.begin


def split_document(length: int, start: int, sequence: int) -> list[tuple[int, int]]:
    """Consecutive pieces of a document, at most `sequence` long, that hold all that is to be learned, the first with
    some of what comes before.
    """
    if length <= sequence:
        return [(0, length)]
    first = 0 if start < sequence * 3 // 4 else start - sequence // 4
    return [
        (b, min(b + sequence, length))
        for b in range(first, length, sequence)
        if b == first or length - max(b, start) >= _MIN_LEARNED_TOKENS
    ]


def split_documents(sources: Sequence[DocumentSequence], chosen: Sequence[Sequence[int]], sequence: int) -> ChunkTable:
    """The chosen documents of every data set, cut; documents without anything to learn are left out."""
    rows = []
    for s, (documents, indices) in enumerate(zip(sources, chosen, strict=True)):
        for i in indices:
            text = documents[i]
            length, start = len(text.tokens), max(text.start, 1)
            rows += [(s, i, b, e, e - max(b, start)) for b, e in split_document(length, start, sequence) if e > max(b, start)]
    table = np.array(rows, np.int64).reshape(-1, 5)
    return ChunkTable(*(np.ascontiguousarray(c) for c in table.T))


@dataclass(frozen=True)
class BatchingConfig:
    """How pieces become batches."""

    seed: int
    batch_tokens: int
    accumulate: int
    dataset_weights: tuple[float, ...]
    """Of every data set."""


BatchRows = list[Int[np.ndarray, " b"]]
"""The batches of a step, each the rows of its pieces."""


class BatchSchedule:
    """The steps of a training, in order, epoch after epoch."""

    def __init__(self, rows: ChunkTable, order: BatchingConfig) -> None:
        self.chunks, self._order = rows, order
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
        whole = int(epochs)
        before = self._epoch_end(whole - 1) if whole else 0
        part = round((epochs - whole) * len(self._epoch_steps(whole))) if epochs > whole else 0
        return max(before + part, 1)

    def _epoch_end(self, epoch: int) -> int:
        while len(self._epoch_ends) <= epoch:
            before = self._epoch_ends[-1] if self._epoch_ends else 0
            self._epoch_ends.append(before + len(self._epoch_steps(len(self._epoch_ends))))
        return self._epoch_ends[epoch]

    def _epoch_steps(self, epoch: int) -> list[BatchRows]:
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            batches = epoch_batches(self.chunks, self._order, epoch)
            n = self._order.accumulate
            self._cached_epoch = epoch, [batches[i : i + n] for i in range(0, len(batches), n)]
        return self._cached_epoch[1]


def epoch_batches(rows: ChunkTable, order: BatchingConfig, epoch: int) -> BatchRows:
    """The batches of an epoch: pieces in a random order, those of similar length together, no batch above its
    tokens.
    """
    rng = np.random.default_rng([order.seed, epoch])
    weight = np.array(order.dataset_weights)[rows.dataset]
    times = weight.astype(np.int64) + (rng.random(len(rows)) < weight % 1)
    which = np.repeat(np.arange(len(rows)), times)
    rng.shuffle(which)
    longest = int(rows.length.max())
    bucket = max(256, 32 * order.batch_tokens // longest)
    batches: BatchRows = []
    for i in range(0, len(which), bucket):
        batches += _pack(which[i : i + bucket], rows.length, order.batch_tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


def _pack(which: Int[np.ndarray, " k"], length: Int[np.ndarray, " n"], most: int) -> BatchRows:
    which = which[np.argsort(-length[which], kind="stable")]
    batches, i = [], 0
    while i < len(which):
        rows = max(most // int(length[which[i]]), 1)
        batches.append(which[i : i + rows])
        i += rows
    return batches
