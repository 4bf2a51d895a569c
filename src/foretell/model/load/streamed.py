"""Packed weights that are read from the file of the cache while passes run, past the system's page cache."""

import ctypes
from typing import Any

from torch import Tensor

from foretell.model.kernels import structures
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.packed_file import PackedFileError, PackedPart, PackedReader, checksum, restore
from foretell.model.kernels.structures import PANEL, Precision
from foretell.model.kernels.uncached_file import PAGE, UncachedFile

_HEAD = 0
"""The part that is the head."""


class StreamedParts:
    """The parts of a file of packed weights, each read anew whenever it is asked for; its checksum is compared the
    first time.
    """

    def __init__(self, reader: PackedReader) -> None:
        self._reader, self._file = reader, UncachedFile(reader.path)
        self._known: set[int] = set()

    def read(self, i: int) -> PackedPart:
        """Part `i`.

        Raises:
            OSError: the file cannot be read.
            ValueError: the part is damaged.
        """
        part = self._reader.description(i)
        memory = self._file.read(part["offset"], part["bytes"])
        if i not in self._known:
            self._compare(part, checksum(memory.numpy()))
            self._known.add(i)
        return restore(part, memory)

    def _compare(self, part: Any, total: int) -> None:
        if total % 2**64 != part["sum"]:
            raise PackedFileError(f"{self._reader.path}: damaged (a part's checksum differs)")


class StreamedHead:
    """The head in pieces of rows of about `piece_bytes`, each read anew whenever it is asked for. The checksum is
    compared when all have been read once.
    """

    def __init__(self, reader: PackedReader, precision: Precision, piece_bytes: int) -> None:
        self._reader, self._file, self._precision = reader, UncachedFile(reader.path), precision
        self._part = reader.description(_HEAD)
        self._weight = _weight_of(self._part)
        ((self._start, size),) = self._part["tensors"]
        self._panels = -(-self._weight.outputs // PANEL)
        self._panel_bytes = size // self._panels
        self._step = max(1, (piece_bytes - 2 * PAGE) // self._panel_bytes)
        self.sizes = [self._range(i)[1] for i in range(-(-self._panels // self._step))]
        """Bytes of every piece."""
        self._sums: dict[int, int] = {}

    @staticmethod
    def supports(reader: PackedReader) -> bool:
        """Whether the head is one matrix without a bias."""
        part = reader.description(_HEAD)
        return len(part["tensors"]) == len(part["structs"]) == 1

    def absent(self) -> NativeLinear:
        """A layer of the head's sizes and without its weights, which must not be applied."""
        return NativeLinear.of_packed(PackedPart([_weight_of(self._part)], []), self._precision)

    def _range(self, i: int) -> tuple[int, int]:
        """Offset and size of the pages of the file with piece `i`."""
        panels = range(self._panels)[i * self._step : (i + 1) * self._step]
        begin = self._part["offset"] + self._start + panels.start * self._panel_bytes
        end = begin + len(panels) * self._panel_bytes
        offset = begin // PAGE * PAGE
        return offset, -(-(end - offset) // PAGE) * PAGE

    def read(self, i: int) -> NativeLinear:
        """Rows `i` of the pieces.

        Raises:
            OSError: the file cannot be read.
            ValueError: the head is damaged.
        """
        offset, size = self._range(i)
        first, last = i * self._step, min((i + 1) * self._step, self._panels)
        begin = self._part["offset"] + self._start + first * self._panel_bytes - offset
        words = self._file.read(offset, size)[begin : begin + (last - first) * self._panel_bytes]
        self._check(i, words)
        weight = _weight_of(self._part)
        weight.outputs = min(last * PANEL, weight.outputs) - first * PANEL
        weight.words = words.data_ptr()
        return NativeLinear.of_packed(PackedPart([weight], [words]), self._precision)

    def _check(self, i: int, words: Tensor) -> None:
        if len(self._sums) < len(self.sizes):
            self._sums[i] = checksum(words.numpy())
            if len(self._sums) == len(self.sizes) and sum(self._sums.values()) % 2**64 != self._part["sum"]:
                raise PackedFileError(f"{self._reader.path}: damaged (the head's checksum differs)")


def _weight_of(part: Any) -> structures.Weight:
    """The structure of a part that is one matrix, without a pointer to its words."""
    (described,) = part["structs"]
    weight = structures.Weight.from_buffer_copy(bytes.fromhex(described["bytes"]))
    ctypes.memset(ctypes.addressof(weight) + structures.Weight.words.offset, 0, ctypes.sizeof(ctypes.c_void_p))
    return weight
