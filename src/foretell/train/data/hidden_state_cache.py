"""The target's hidden states of a data set's documents, in files."""

import os
import zlib
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int


class HiddenStateCache:
    """Hidden states of one data set's documents: one file of bfloat16 rows per layer.

    A second file per layer holds one checksum per document (of its tokens and offset), which is written after the
    document's rows. So an interrupted write is noticed, and so is a data set that was generated again.

    `lengths`: tokens of each document. `max_bytes`: size that all layers together may have; None: no limit.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        hidden_layers: Sequence[int],
        lengths: Sequence[int],
        hidden: int,
        max_bytes: int | None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.hidden_layers = tuple(hidden_layers)
        self._offset = list(accumulate(lengths, initial=0))
        self._documents = len(lengths)
        if max_bytes is not None:
            self._documents = bisect(self._offset, max_bytes // (2 * hidden * max(len(hidden_layers), 1))) - 1
        size = self._offset[self._documents] * 2 * hidden
        self._files = [_LayerFile(folder / f"{fingerprint}-{t}", size, hidden, self._offset[1:]) for t in hidden_layers]

    def fits(self, document: int) -> bool:
        """Whether the document fits into `max_bytes`."""
        return document < self._documents

    def contains(self, document: int, tokens: Int[np.ndarray, " t"]) -> bool:
        """Whether the states of a document are stored for all layers."""
        checksum = self._checksum(document, tokens)
        return all(int(f.checksums[document]) == checksum for f in self._files)

    def load(self, document: int, begin: int, end: int) -> list[Float[torch.Tensor, "s d"]]:
        """States of tokens `begin .. end-1` of a document, one tensor per layer."""
        first = self._offset[document]
        return [f.read(first + begin, first + end) for f in self._files]

    def store(self, document: int, tokens: Int[np.ndarray, " t"], states: Sequence[Float[torch.Tensor, "t d"]]) -> None:
        """Write the states of a document."""
        checksum = self._checksum(document, tokens)
        for file, state in zip(self._files, states, strict=True):
            if int(file.checksums[document]) != checksum:
                file.write(self._offset[document], state, document, checksum)

    def append(self, tokens: Int[np.ndarray, " t"], states: Sequence[Float[torch.Tensor, "t d"]]) -> None:
        """Write the states of a document that was appended to the data set."""
        self._offset.append(self._offset[-1] + len(tokens))
        self._documents += 1
        for file in self._files:
            file.add_document()
        self.store(self._documents - 1, tokens, states)

    def _checksum(self, document: int, tokens: Int[np.ndarray, " t"]) -> int:
        offset = self._offset[document].to_bytes(8, "little")
        # 0 means that a document is not stored.
        return max(zlib.crc32(tokens.astype(np.int32).tobytes(), zlib.crc32(offset)), 1)


class _LayerFile:
    """The states of one layer, and the checksums of the documents that are stored; 0: not stored.

    Uses `pwrite` instead of a writable memory map, where a full disk would be a signal instead of an error.

    `ends`: row after the last one of each document. Documents beyond the end of a file that was cut have no checksum.
    """

    _data_file = _checksum_file = -1

    def __init__(self, path: Path, size: int, hidden: int, ends: Sequence[int]) -> None:
        self._hidden, self._path, documents = hidden, path.with_suffix(".bf16"), len(ends)
        self._data_file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._checksum_file = os.open(path.with_suffix(".done"), os.O_RDWR | os.O_CREAT, 0o644)
        stored = os.fstat(self._data_file).st_size // (2 * hidden)
        for descriptor, least in ((self._data_file, size), (self._checksum_file, 4 * documents)):
            if os.fstat(descriptor).st_size < least:
                os.ftruncate(descriptor, least)
        self.checksums = np.frombuffer(os.pread(self._checksum_file, 4 * documents, 0), np.uint32).copy()
        self.checksums[np.array(ends, np.int64) > stored] = 0
        self._map = np.zeros((0, hidden), np.int16)

    def __del__(self) -> None:
        for descriptor in (self._data_file, self._checksum_file):
            if descriptor >= 0:
                os.close(descriptor)

    def add_document(self) -> None:
        self.checksums = np.append(self.checksums, np.uint32(0))

    def read(self, first: int, last: int) -> Float[torch.Tensor, "s d"]:
        if last > len(self._map):
            stored = os.fstat(self._data_file).st_size // (2 * self._hidden)
            self._map = np.memmap(self._path, np.int16, "r", shape=(stored, self._hidden))
        return torch.from_numpy(np.array(self._map[first:last])).view(torch.bfloat16)

    def write(self, first: int, state: Float[torch.Tensor, "t d"], document: int, checksum: int) -> None:
        try:
            _write_all(
                self._data_file, state.contiguous().view(torch.int16).numpy().tobytes(), first * 2 * self._hidden
            )
            _write_all(self._checksum_file, checksum.to_bytes(4, "little"), 4 * document)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.checksums[document] = checksum


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
