"""Packs weights for the kernels: panels of 32 outputs, one 32-bit word of the input at a time."""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from foretell.model.kernels.structures import LANES, PANEL, PRECISIONS, Precision
from foretell.model.linear import INT8_BLOCK, INT8_GROUP
from foretell.model.stored_matrix import FLOAT_KINDS, StoredMatrix

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on Linux."""
_CHUNK = 1 << 20
"""Numbers that are packed at a time: bounds the memory for widened rows."""


@dataclass(frozen=True)
class Matrix:
    """A matrix to be packed: parts of the same inputs, one below the other, or gate and up interleaved."""

    parts: tuple[StoredMatrix, ...]
    interleaved: bool = False
    """The two parts alternate in turns of 16 rows, each padded to whole turns: a panel holds both factors of 16
    outputs."""
    through_bfloat16: bool = False
    """Numbers are rounded to bfloat16 before anything else is done with them."""

    @staticmethod
    def of(weight: "Matrix | Tensor", interleaved: bool = False) -> "Matrix":
        """A [out, in] tensor of any float dtype; with `interleaved` its first half is the gate, the second up."""
        if isinstance(weight, Matrix):
            return weight
        halves = weight.chunk(2) if interleaved else (weight,)
        return Matrix(tuple(map(StoredMatrix.of, halves)), interleaved)

    @property
    def inputs(self) -> int:
        """Length of a row."""
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        """Number of rows, padding between interleaved parts included."""
        rows = [part.outputs for part in self.parts]
        return sum(-(-count // LANES) * LANES for count in rows) if self.interleaved else sum(rows)

    def order(self) -> Int[np.ndarray, " rows"]:
        """Numbers of the rows, counted over all parts, padded to whole panels with -1."""
        first, numbers = 0, list[np.ndarray]()
        for part in self.parts:
            numbers.append(np.arange(first, first + part.outputs))
            first += part.outputs
        if self.interleaved:
            turns = [_pad(part, LANES).reshape(-1, LANES) for part in numbers]
            return _pad(np.stack(turns, 1).ravel(), PANEL)
        return _pad(np.concatenate(numbers), PANEL)


def _pad(numbers: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(numbers, (0, -len(numbers) % multiple), constant_values=-1)


def panel_bytes(inputs: int, precision: Precision) -> int:
    """Bytes of a packed panel of 32 outputs."""
    if precision == "float32":
        return PANEL * 4 * inputs
    if precision == "bfloat16":
        return PANEL * 4 * -(-inputs // 2)
    padded = -(-inputs // INT8_BLOCK) * INT8_BLOCK
    return PANEL * (padded + 4 * -(-padded // INT8_GROUP))


def pack_matrices(matrices: Sequence[Matrix], precision: Precision, kernels: ctypes.CDLL) -> list[Tensor]:
    """Pack matrices into one block of huge pages, which takes fewer TLB misses to stream, on all threads.

    int8 weights are rotated first and have one scale per output and group of inputs, stored after the group.
    """
    sizes = [-(-m.outputs // PANEL) * panel_bytes(m.inputs, precision) for m in matrices]
    packed = list(torch.split(allocate(sum(sizes)), sizes))
    tasks = [
        task for m, words in zip(matrices, packed, strict=True) for task in _pack_tasks(m, words, precision, kernels)
    ]
    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
    return packed


def _pack_tasks(
    matrix: Matrix, words: Tensor, precision: Precision, kernels: ctypes.CDLL
) -> Iterator[Callable[[], None]]:
    """Calls that pack a few panels each."""
    order, size = matrix.order(), panel_bytes(matrix.inputs, precision)
    step = max(_CHUNK // matrix.inputs // PANEL, 1) * PANEL
    for first in range(0, len(order), step):
        target = words[first // PANEL * size :]
        yield partial(_pack_chunk, matrix, order[first : first + step], target, precision, kernels)


def _pack_chunk(
    matrix: Matrix, order: Int[np.ndarray, " rows"], words: Tensor, precision: Precision, kernels: ctypes.CDLL
) -> None:
    kinds = {part.kind for part in matrix.parts}
    as_stored = len(kinds) == 1 and kinds <= FLOAT_KINDS.keys()
    address, first = np.zeros(len(order), np.uint64), 0
    kept = []
    """Widened rows, alive until they are packed."""
    for part in matrix.parts:
        here = np.flatnonzero((order >= first) & (order < first + part.outputs))
        rows = order[here] - first
        first += part.outputs
        data = part.data
        if not as_stored:
            data = part.rows(torch.from_numpy(rows)).widen().float().contiguous().view(torch.uint8)
            rows = np.arange(len(rows))
            kept.append(data)
        address[here] = data.data_ptr() + rows * data.shape[1]
    kind = kinds.pop() if as_stored else "F32"
    kernels.foretell_pack_rows(
        *(PRECISIONS.index(precision), list(FLOAT_KINDS).index(kind), matrix.through_bfloat16),
        *(address.ctypes.data, len(order) // PANEL, matrix.inputs, words.data_ptr()),
    )


def pad_bias(vector: Tensor) -> Tensor:
    """Pad a bias to whole panels."""
    return pad(vector.detach().float(), (0, -vector.shape[0] % PANEL)).contiguous()


def allocate(size: int) -> Tensor:
    """Uninitialised bytes in huge pages, where the system has them."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a Linux kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + size]
