"""Which pieces of which documents every step sees: a function of seed and step, so that a training can be resumed
anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

_LEAST = 8
"""Fewest tokens to be learned that make a piece at the end of a long document worth showing."""


class Text(Protocol):
    """A document as data sets give it; `tokens[start:]` are to be learned."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids."""

    @property
    def start(self) -> int:
        """First token to be learned."""


class Documents(Protocol):
    """A data set, as far as the order of its documents goes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Text: ...


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, one a row: tokens `begin .. end-1` of a document of a data set."""

    source: Int[np.ndarray, " n"]
    document: Int[np.ndarray, " n"]
    begin: Int[np.ndarray, " n"]
    end: Int[np.ndarray, " n"]
    learned: Int[np.ndarray, " n"]
    """Tokens to be learned."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def length(self) -> Int[np.ndarray, " n"]:
        """Tokens of each."""
        return self.end - self.begin


def cut(length: int, start: int, sequence: int) -> list[tuple[int, int]]:
    """Consecutive pieces of a document, at most `sequence` long, that hold all that is to be learned, the first with
    some of what comes before.
    """
    if length <= sequence:
        return [(0, length)]
    first = 0 if start < sequence * 3 // 4 else start - sequence // 4
    return [
        (b, min(b + sequence, length))
        for b in range(first, length, sequence)
        if b == first or length - max(b, start) >= _LEAST
    ]


def pieces(sources: Sequence[Documents], chosen: Sequence[Sequence[int]], sequence: int) -> Pieces:
    """The chosen documents of every data set, cut; documents without anything to learn are left out."""
    rows = []
    for s, (documents, indices) in enumerate(zip(sources, chosen, strict=True)):
        for i in indices:
            text = documents[i]
            length, start = len(text.tokens), max(text.start, 1)
            rows += [(s, i, b, e, e - max(b, start)) for b, e in cut(length, start, sequence) if e > max(b, start)]
    table = np.array(rows, np.int64).reshape(-1, 5)
    return Pieces(*(np.ascontiguousarray(c) for c in table.T))


@dataclass(frozen=True)
class Order:
    """How pieces become batches."""

    seed: int
    batch_tokens: int
    accumulate: int
    weight: tuple[float, ...]
    """Of every data set."""


Batches = list[Int[np.ndarray, " b"]]
"""The batches of a step, each the rows of its pieces."""


class Schedule:
    """The steps of a training, in order, epoch after epoch."""

    def __init__(self, rows: Pieces, order: Order) -> None:
        self.pieces, self._order = rows, order
        self._ends: list[int] = []
        self._known: tuple[int, list[Batches]] | None = None

    def at(self, step: int) -> Batches:
        """The batches of a step (counted from 0)."""
        epoch = 0
        while self._end(epoch) <= step:
            epoch += 1
        return self._epoch(epoch)[step - (self._ends[epoch - 1] if epoch else 0)]

    def steps(self, epochs: float) -> int:
        """Steps of so many epochs, at least one."""
        whole = int(epochs)
        before = self._end(whole - 1) if whole else 0
        part = round((epochs - whole) * len(self._epoch(whole))) if epochs > whole else 0
        return max(before + part, 1)

    def _end(self, epoch: int) -> int:
        while len(self._ends) <= epoch:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._epoch(len(self._ends))))
        return self._ends[epoch]

    def _epoch(self, epoch: int) -> list[Batches]:
        if self._known is None or self._known[0] != epoch:
            batches = shuffled(self.pieces, self._order, epoch)
            n = self._order.accumulate
            self._known = epoch, [batches[i : i + n] for i in range(0, len(batches), n)]
        return self._known[1]


def shuffled(rows: Pieces, order: Order, epoch: int) -> Batches:
    """The batches of an epoch: pieces in a random order, those of similar length together, no batch above its
    tokens.
    """
    rng = np.random.default_rng([order.seed, epoch])
    weight = np.array(order.weight)[rows.source]
    times = weight.astype(np.int64) + (rng.random(len(rows)) < weight % 1)
    which = np.repeat(np.arange(len(rows)), times)
    rng.shuffle(which)
    longest = int(rows.length.max())
    bucket = max(256, 32 * order.batch_tokens // longest)
    batches: Batches = []
    for i in range(0, len(which), bucket):
        batches += _packed(which[i : i + bucket], rows.length, order.batch_tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


def _packed(which: Int[np.ndarray, " k"], length: Int[np.ndarray, " n"], most: int) -> Batches:
    which = which[np.argsort(-length[which], kind="stable")]
    batches, i = [], 0
    while i < len(which):
        rows = max(most // int(length[which[i]]), 1)
        batches.append(which[i : i + rows])
        i += rows
    return batches
