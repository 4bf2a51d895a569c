"""Hidden states of the target for training: read batch by batch, or kept on disk once they were read."""

import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.training.full_forward import full_forward

_GRAIN = 16
"""Widths of batches are rounded up to a multiple of this, so that kernels meet few shapes."""


@dataclass(frozen=True)
class Piece:
    """A piece of a document with what it was cut from."""

    source: int
    document: int
    text: Int[np.ndarray, " t"]
    """Of the whole document."""
    begin: int
    end: int


def hidden_layers_of(text: str, highest: int, option: str) -> tuple[int, ...]:
    """Numbers of taps as a user writes them: `2,15,27`.

    Raises:
        ValueError: something else, or the target has no such layer.
    """
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (-1,)
    if not all(0 <= hidden_layer <= highest for hidden_layer in found):
        raise ValueError(
            f"{option}={text}: layers of the target by number, 0 to {highest}, with commas between, were expected"
        )
    return found


@torch.no_grad()
def read(
    decoder: Decoder, token: Int[torch.Tensor, "b s"], hidden_layers: Sequence[int]
) -> tuple[Float[torch.Tensor, "b s d"], ...]:
    """The target's states for whole texts, without a cache; taps are numbered as in `Runner.forward`.

    Padding belongs at the end.
    """
    layers, done = decoder.config.layers, 0
    x, found = decoder.embed(token.reshape(-1)).view(*token.shape, -1), dict[int, torch.Tensor]()
    for stop in sorted({min(t, layers) for t in hidden_layers}):
        x = full_forward(decoder, x, done, stop)
        found[stop], done = x, stop
    if layers + 1 in hidden_layers:
        found[layers + 1] = decoder.final(x)
    return tuple(found[t] for t in hidden_layers)


def width(longest: int) -> int:
    """How wide a batch is made whose longest text has so many tokens."""
    return -(-longest // _GRAIN) * _GRAIN


def padded(texts: Sequence[Int[np.ndarray, " _"]], wide: int) -> Int[torch.Tensor, "b s"]:
    """Texts as the rows of a rectangle, zeros at their ends."""
    out = torch.zeros(len(texts), wide, dtype=torch.int64)
    for i, text in enumerate(texts):
        out[i, : len(text)] = torch.from_numpy(text.astype(np.int64))
    return out


class Features(ABC):
    """Where batches get the target's states from."""

    hidden_layers: tuple[int, ...]

    @abstractmethod
    def of(self, chosen: Sequence[Piece], wide: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """The states of pieces, one tensor per recorded layer; what stands at padding is finite and means nothing."""


class Streamed(Features):
    """The target reads every batch; each piece on its own, as if its document began there.

    `decoder` gives the target, and is called when something has to be read.
    """

    def __init__(self, decoder: Callable[[], Decoder], hidden_layers: tuple[int, ...]) -> None:
        self._decoder, self.hidden_layers = decoder, hidden_layers

    def of(self, chosen: Sequence[Piece], wide: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Read the pieces."""
        return self.read([p.text[p.begin : p.end] for p in chosen], wide)

    def read(self, texts: Sequence[Int[np.ndarray, " _"]], wide: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Read texts."""
        if not self.hidden_layers:
            return ()
        decoder = self._decoder()
        return read(decoder, padded(texts, wide).to(decoder.device), self.hidden_layers)


class Cached(Features):
    """The target reads every document once, whole; the states are kept in files beside the data set, shared by all
    trainings that tap the same.

    `shelves`: one per data set. A document that its shelf has no room for, or the target no context, is read again
    every time, as `Streamed` does. `config` and `dtype` are the target's.
    """

    def __init__(self, streamed: Streamed, shelves: Sequence["Shelf"], config: ModelConfig, dtype: torch.dtype) -> None:
        self.hidden_layers, self._streamed, self._shelves = streamed.hidden_layers, streamed, tuple(shelves)
        self._config, self._dtype = config, dtype

    def of(self, chosen: Sequence[Piece], wide: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Look the pieces up; what is missing is read and kept."""
        self._fill([p for p in chosen if self._takes(p) and not self._shelves[p.source].has(p.document, p.text)])
        kept = [i for i, p in enumerate(chosen) if self._takes(p)]
        rest = [i for i in range(len(chosen)) if i not in set(kept)]
        shape = (len(chosen), wide, self._config.hidden)
        out = [torch.zeros(shape, dtype=torch.bfloat16) for _ in self.hidden_layers]
        for i in kept:
            p = chosen[i]
            for to, part in zip(out, self._shelves[p.source].get(p.document, p.begin, p.end), strict=True):
                to[i, : p.end - p.begin] = part
        if rest:
            for to, part in zip(out, self._streamed.of([chosen[i] for i in rest], wide), strict=True):
                to[rest] = part.to("cpu", torch.bfloat16)
        return tuple(t.to(self._dtype) for t in out)

    def _takes(self, piece: Piece) -> bool:
        fits = len(piece.text) <= self._config.context
        return fits and self._shelves[piece.source].takes(piece.document)

    def _fill(self, missing: Sequence[Piece]) -> None:
        # A document that was cut may be there with several pieces.
        todo = list({(p.source, p.document): p for p in missing}.values())
        if not todo:
            return
        longest = max(len(p.text) for p in todo)
        states = self._streamed.read([p.text for p in todo], width(longest))
        for i, p in enumerate(todo):
            rows = [state[i, : len(p.text)].to("cpu", torch.bfloat16) for state in states]
            self._shelves[p.source].put(p.document, p.text, rows)


class Shelf:
    """The states of one data set's documents, a file of bfloat16 rows per recorded layer.

    Beside it stands a file with a mark per document, the checksum of its tokens and place, written after its rows: a
    kill can lose documents but not damage them, and a data set that was made anew is read anew. `lengths`: of the
    documents; `max_depth`: bytes that all taps together may take, None for any number.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        hidden_layers: Sequence[int],
        lengths: Sequence[int],
        hidden: int,
        room: int | None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.hidden_layers = tuple(hidden_layers)
        self._offset = list(accumulate(lengths, initial=0))
        self._documents = len(lengths)
        if room is not None:
            self._documents = bisect(self._offset, room // (2 * hidden * max(len(hidden_layers), 1))) - 1
        size = self._offset[self._documents] * 2 * hidden
        self._files = [_LayerFile(folder / f"{fingerprint}-{t}", size, hidden, self._offset[1:]) for t in hidden_layers]

    def takes(self, document: int) -> bool:
        """Whether there is room for a document."""
        return document < self._documents

    def has(self, document: int, text: Int[np.ndarray, " t"]) -> bool:
        """Whether all states of a document are here."""
        mark = self._mark(document, text)
        return all(int(f.marks[document]) == mark for f in self._files)

    def get(self, document: int, begin: int, end: int) -> list[Float[torch.Tensor, "s d"]]:
        """States of a part of a document, one tensor per recorded layer."""
        first = self._offset[document]
        return [f.rows(first + begin, first + end) for f in self._files]

    def put(self, document: int, text: Int[np.ndarray, " t"], states: Sequence[Float[torch.Tensor, "t d"]]) -> None:
        """Keep the states of a document."""
        mark = self._mark(document, text)
        for file, state in zip(self._files, states, strict=True):
            if int(file.marks[document]) != mark:
                file.write(self._offset[document], state, document, mark)

    def append(self, text: Int[np.ndarray, " t"], states: Sequence[Float[torch.Tensor, "t d"]]) -> None:
        """Keep the states of a document that the data set has got since, its last one."""
        self._offset.append(self._offset[-1] + len(text))
        self._documents += 1
        for file in self._files:
            file.lengthen(1)
        self.put(self._documents - 1, text, states)

    def _mark(self, document: int, text: Int[np.ndarray, " t"]) -> int:
        place = self._offset[document].to_bytes(8, "little")
        return max(zlib.crc32(text.astype(np.int32).tobytes(), zlib.crc32(place)), 1)


class _LayerFile:
    """The rows of one tap, and the marks of the documents that are in it.

    Written with plain writes: a full disk is an error, not a signal.

    `embedding_and_head`: the row after the last one of every document; documents that the file is too short for have no mark,
    whatever was noted.
    """

    _data = _notes = -1

    def __init__(self, path: Path, size: int, hidden: int, ends: Sequence[int]) -> None:
        self._hidden, self._path, documents = hidden, path.with_suffix(".bf16"), len(ends)
        self._data = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._notes = os.open(path.with_suffix(".done"), os.O_RDWR | os.O_CREAT, 0o644)
        there = os.fstat(self._data).st_size // (2 * hidden)
        for descriptor, least in ((self._data, size), (self._notes, 4 * documents)):
            if os.fstat(descriptor).st_size < least:
                os.ftruncate(descriptor, least)
        self.marks = np.frombuffer(os.pread(self._notes, 4 * documents, 0), np.uint32).copy()
        self.marks[np.array(ends, np.int64) > there] = 0
        self._map = np.zeros((0, hidden), np.int16)

    def __del__(self) -> None:
        for descriptor in (self._data, self._notes):
            if descriptor >= 0:
                os.close(descriptor)

    def lengthen(self, documents: int) -> None:
        self.marks = np.concatenate([self.marks, np.zeros(documents, np.uint32)])

    def rows(self, first: int, last: int) -> Float[torch.Tensor, "s d"]:
        if last > len(self._map):
            there = os.fstat(self._data).st_size // (2 * self._hidden)
            self._map = np.memmap(self._path, np.int16, "r", shape=(there, self._hidden))
        return torch.from_numpy(np.array(self._map[first:last])).view(torch.bfloat16)

    def write(self, first: int, state: Float[torch.Tensor, "t d"], document: int, mark: int) -> None:
        try:
            _write_all(self._data, state.contiguous().view(torch.int16).numpy().tobytes(), first * 2 * self._hidden)
            _write_all(self._notes, mark.to_bytes(4, "little"), 4 * document)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.marks[document] = mark


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
