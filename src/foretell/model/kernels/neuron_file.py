"""A file with the neurons of feed-forward networks, one record each, which is mapped into memory."""

import mmap
import os
import weakref
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from foretell.model.block.spec import GatedWeights
from foretell.model.kernels.rows import row_tensor
from foretell.model.kernels.sparse import input_rows
from foretell.model.kernels.structures import PANEL, Precision
from foretell.model.kernels.uncached_file import PAGE

_ROWS = 3
"""Rows of a record: up, down and gate; see `NeuronPlaces` of csrc/interface.h."""
_WASTE = 0.2
"""Share of a record that may be padding, so that it begins with a page."""


def row_words(hidden: int, floats: Precision) -> int:
    """Words of a row of a record."""
    return -(-hidden // PANEL) * PANEL // (1 if floats == "float32" else 2)


def record_bytes(hidden: int, floats: Precision) -> int:
    """Bytes of a record: whole pages where little is lost by that."""
    size = 4 * _ROWS * row_words(hidden, floats)
    pages = -(-size // PAGE) * PAGE
    return pages if pages - size <= _WASTE * pages else size


def layer_bytes(neurons: int, hidden: int, floats: Precision) -> int:
    """Bytes of a layer in the file, whole pages."""
    return -(-neurons * record_bytes(hidden, floats) // PAGE) * PAGE


def write_layer(file: BinaryIO, network: GatedWeights, order: Int[Tensor, " f"], floats: Precision) -> None:
    """Append the neurons of a gated network in this order.

    Raises:
        OSError: the disk is full or fails.
    """
    (down,), (gate, up) = network.down.parts, network.gate_up.parts
    words = row_words(down.shape[0], floats)
    records = torch.zeros(len(order), record_bytes(down.shape[0], floats) // 4, dtype=torch.int32)
    for i, rows in enumerate((row_tensor(up, floats), input_rows(down, floats), row_tensor(gate, floats))):
        records[:, i * words : (i + 1) * words] = rows.contiguous().view(torch.int32).view(len(order), words)[order]
    file.write(records.numpy().tobytes())
    file.write(bytes(-records.nbytes % PAGE))


class NeuronFile:
    """The mapped file of so many layers.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it has not the size that these layers take.
    """

    def __init__(self, path: Path, layers: int, neurons: int, hidden: int, floats: Precision) -> None:
        self.floats, self.neurons, self.hidden = floats, neurons, hidden
        self.layer_bytes, self.record_bytes = layer_bytes(neurons, hidden, floats), record_bytes(hidden, floats)
        self.row_words = row_words(hidden, floats)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        expected, size = layers * self.layer_bytes, os.fstat(self.descriptor).st_size
        if size != expected:
            raise ValueError(f"{path}: damaged: {layers} layers of neurons take {expected:,} bytes, found {size:,}")
        self._map = mmap.mmap(self.descriptor, expected, access=mmap.ACCESS_READ)
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def address(self, layer: int) -> int:
        """Where the records of a layer lie in memory."""
        return int(self._bytes.ctypes.data) + layer * self.layer_bytes

    def read(self, layer: int, count: int) -> UInt8[np.ndarray, "n bytes"]:
        """The first `count` records of a layer, uint8 [count, record_bytes], past the mapping.

        Raises:
            OSError: the file cannot be read.
        """
        out = np.empty((count, self.record_bytes), np.uint8)
        view, have, offset = out.reshape(-1).data, 0, layer * self.layer_bytes
        while have < out.nbytes:
            got = os.preadv(self.descriptor, [view[have:]], offset + have)
            if not got:
                raise OSError(f"the file of neurons ends {out.nbytes - have} bytes too early")
            have += got
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, out.nbytes, os.POSIX_FADV_DONTNEED)
        return out
