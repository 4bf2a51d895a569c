"""Packs weights for the kernels: panels of 32 outputs, one 32-bit word of the input at a time."""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from foretell.model.kernels.structures import LANES, PANEL, PANEL_KINDS, Precision
from foretell.model.matrices.kinds import BLOCKS
from foretell.model.matrices.stored import FLOAT_KINDS, Matrix, StoredMatrix

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on Linux."""
_CHUNK = 1 << 20
"""Numbers that a thread packs at a time: bounds the memory for widened rows."""
_READ = 4 << 20
"""Bytes of rows, packed as the checkpoint stores them, that a thread reads at a time."""
_RELEASED = 64 << 20
"""Packed bytes after which the pages of the source are returned to the system."""
TWO_OF_FOUR = "BF16_2:4"
"""Kind of panels whose rows are bfloat16 with at most two of four consecutive inputs that are not zero."""
TWO_OF_FOUR_INPUTS = 32
"""Inputs of a block of such panels."""
_SAMPLED_ROWS = 32
"""Rows that are looked at first for this pattern."""
_ROW_TYPES = list(FLOAT_KINDS)
"""Float rows that the kernels read, in the order of `RowType` in csrc/pack.h."""


@dataclass(frozen=True)
class Panels:
    """Outputs of a linear layer that are packed alike, and the matrices that they come from."""

    parts: tuple[StoredMatrix, ...]
    order: Int[np.ndarray, " rows"]
    """Rows of all parts, counted through, in the order of the outputs, padded to whole panels; -1: a row of zeros."""
    outputs: int
    kind: str
    """One of `PANEL_KINDS`."""
    operand: Precision
    """What the inputs of the product are rounded to; one of `structures.OPERANDS`."""
    through_bfloat16: bool = False
    """Numbers are rounded to bfloat16 before they become int8."""

    @property
    def inputs(self) -> int:
        """Length of a row."""
        return self.parts[0].inputs

    @property
    def _as_stored(self) -> bool:
        """Whether the rows are packed from what the checkpoint stores; else they are widened first."""
        kinds = {part.kind for part in self.parts}
        return len(kinds) == 1 and (self.kind in kinds or kinds <= FLOAT_KINDS.keys())

    def panel_bytes(self, kernels: ctypes.CDLL) -> int:
        """Bytes of a panel."""
        return 4 * int(kernels.foretell_panel_words(PANEL_KINDS.index(self.kind), self.inputs))

    def nbytes(self, kernels: ctypes.CDLL) -> int:
        """Bytes of all panels."""
        return len(self.order) // PANEL * self.panel_bytes(kernels)

    def tasks(self, words: Tensor, kernels: ctypes.CDLL) -> Iterator[Callable[[], int]]:
        """Calls that pack a few panels each into `words`, and return their bytes."""
        per_block, stored = BLOCKS[self.parts[0].kind]
        rows = _READ * per_block // stored // self.inputs if self._as_stored else _CHUNK // self.inputs
        size, step = self.panel_bytes(kernels), max(rows // PANEL, 1) * PANEL
        for first in range(0, len(self.order), step):
            place = slice(first // PANEL * size, (first + step) // PANEL * size)
            yield partial(self._pack, self.order[first : first + step], words[place], kernels)

    def _pack(self, order: Int[np.ndarray, " rows"], words: Tensor, kernels: ctypes.CDLL) -> int:
        as_stored = self._as_stored
        assert as_stored or self.kind != TWO_OF_FOUR
        address, first = np.zeros(len(order), np.uint64), 0
        alive = []
        """Rows, until they are packed."""
        for part in self.parts:
            here = np.flatnonzero((order >= first) & (order < first + part.outputs))
            rows = order[here] - first
            first += part.outputs
            if not len(rows):
                continue
            least = int(rows.min())
            data, rows = part.read_rows(least, int(rows.max()) + 1), rows - least
            if not as_stored:
                data = widen_rows(StoredMatrix(part.kind, part.inputs, data), rows, kernels).view(torch.uint8)
                rows = np.arange(len(rows))
            alive.append(data)
            address[here] = data.data_ptr() + rows * data.stride(0)
        row_type = self.parts[0].kind if as_stored else "F32"
        kernels.foretell_pack_rows(
            PANEL_KINDS.index(self.kind),
            _ROW_TYPES.index(row_type) if row_type in _ROW_TYPES else 0,
            self.through_bfloat16,
            address.ctypes.data,
            len(order) // PANEL,
            self.inputs,
            words.data_ptr(),
        )
        return words.nbytes


def plan_rows(parts: Sequence[Matrix], precision: Precision) -> list[Panels]:
    """How to pack matrices of the same inputs, one below the other; neighbours of one kind become one weight.

    Quantised matrices keep their blocks, unless floats are asked for, the precision is int8 or a part would end within
    a panel.
    """
    stored = [_stored(part) for part in parts]
    if precision == "int8" or not all(map(_keeps_blocks, stored)) or any(m.outputs % PANEL for m in stored[:-1]):
        return [_float_panels(parts, np.arange(sum(m.outputs for m in stored)), precision)]
    panels = []
    for kind, same in groupby(stored, key=lambda m: m.kind):
        run = tuple(same)
        rows = sum(m.outputs for m in run)
        panels.append(Panels(run, _pad(np.arange(rows), PANEL), rows, kind, precision))
    return panels


def plan_gate_up(gate: Matrix, up: Matrix, precision: Precision) -> Panels:
    """How to pack gate and up in turns of 16 rows: a panel holds both factors of 16 outputs."""
    pair = _stored(gate), _stored(up)
    order = interleaved_rows(pair[0].outputs)
    if precision != "int8" and all(map(_keeps_blocks, pair)) and pair[0].kind == pair[1].kind:
        return Panels(pair, order, len(order), pair[0].kind, precision)
    return _float_panels((gate, up), order, precision)


def plan_inner(gate: Matrix | None, up: Matrix, precision: Precision) -> list[Panels]:
    """How to pack the matrices of a feed-forward network before its activation; `gate` None: it has none."""
    return plan_rows([up], precision) if gate is None else [plan_gate_up(gate, up, precision)]


def interleave_bias(bias: Tensor) -> Tensor:
    """The biases of gate and up, one after the other, in the order of `plan_inner`."""
    return pad(bias, (0, 1))[torch.from_numpy(interleaved_rows(len(bias) // 2))]  # index -1 is a zero


def interleaved_rows(width: int) -> Int[np.ndarray, " rows"]:
    """Rows of gate (0 .. width - 1) and up (from `width` on) in turns of 16; -1: a row of zeros."""
    turns = [_pad(np.arange(first, first + width), LANES).reshape(-1, LANES) for first in (0, width)]
    return np.stack(turns, 1).ravel()


def _float_panels(parts: Sequence[Matrix], order: Int[np.ndarray, " rows"], precision: Precision) -> Panels:
    """A float or int8 weight; with int8 activations, bfloat16. Bfloat16 rows of the pattern 2:4 are packed as such.

    int8 weights are rotated first and have one scale per output and group of inputs, stored after the group. Those of
    a checkpoint are rounded to bfloat16 before.
    """
    kinds = {"float32": "F32", "bfloat16": "BF16", "int8": "int8", "int8-activations": "BF16"}
    operand: Precision = "bfloat16" if precision == "int8-activations" else precision
    rounded = precision != "float32" and any(isinstance(part, StoredMatrix) for part in parts)
    stored = tuple(map(_stored, parts))
    kind = TWO_OF_FOUR if precision != "int8" and all(map(_is_two_of_four, stored)) else kinds[precision]
    return Panels(stored, _pad(order, PANEL), len(order), kind, operand, rounded)


def _is_two_of_four(part: StoredMatrix) -> bool:
    """Whether a part is packed as `TWO_OF_FOUR`; rows of nothing but zeros are no evidence for the pattern."""
    if part.kind != "BF16" or part.inputs % TWO_OF_FOUR_INPUTS:
        return False
    step = max(_CHUNK // part.inputs, 1)
    edges = [0, min(_SAMPLED_ROWS, part.outputs), *range(_SAMPLED_ROWS + step, part.outputs, step), part.outputs]
    numbers = part.data.view(torch.int16)
    return bool(numbers[:_SAMPLED_ROWS].any()) and all(
        int(((numbers[first:last] & 0x7FFF) != 0).unflatten(1, (-1, 4)).sum(-1).max()) <= 2
        for first, last in pairwise(edges)
        if first < last
    )


def _keeps_blocks(part: StoredMatrix) -> bool:
    return part.quantized and not part.as_floats


def _stored(part: Matrix) -> StoredMatrix:
    return part if isinstance(part, StoredMatrix) else StoredMatrix.of(part)


def _pad(numbers: Int[np.ndarray, " n"], multiple: int) -> Int[np.ndarray, " rows"]:
    return np.pad(numbers, (0, -len(numbers) % multiple), constant_values=-1)


def pack(weights: Sequence[Panels], kernels: ctypes.CDLL) -> list[Tensor]:
    """Pack weights into one block of huge pages, which takes fewer TLB misses to stream, on all threads.

    Pages of mapped files that have been packed are returned to the system on the way.
    """
    sizes = [weight.nbytes(kernels) for weight in weights]
    packed = list(torch.split(allocate(sum(sizes)), sizes))
    tasks = [t for weight, words in zip(weights, packed, strict=True) for t in weight.tasks(words, kernels)]
    mapped = {file for weight in weights for part in weight.parts for file in part.mapped}
    resident = 0
    workers = torch.get_num_threads() * (2 if mapped else 1)  # one packs while another waits for the disk
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        for done in [pool.submit(task) for task in tasks]:
            resident += done.result()
            if resident >= _RELEASED:
                resident = 0
                for file in mapped:
                    file.release_pages()
    return packed


def widen_rows(
    matrix: StoredMatrix, rows: Int[np.ndarray, " n"], kernels: ctypes.CDLL
) -> Float[torch.Tensor, "n inputs"]:
    """Rows of a stored matrix in float32."""
    if not matrix.quantized:
        return matrix.rows(torch.from_numpy(rows)).widen().float().contiguous()
    out = torch.empty(len(rows), matrix.inputs)
    widen_quantized_rows(matrix, rows.tolist(), kernels, out.data_ptr())
    return out


def widen_quantized_rows(
    matrix: StoredMatrix,
    rows: Sequence[int],
    kernels: ctypes.CDLL,
    address: int,
    rounded: bool = False,
) -> None:
    """Write rows of a quantised matrix to an address, as float32; rounded: to the nearest bfloat16 numbers."""
    data, places = matrix.data, (ctypes.c_int64 * len(rows))(*rows)
    kind, stride = PANEL_KINDS.index(matrix.kind), data.stride(0)
    kernels.foretell_widen_rows(kind, data.data_ptr(), stride, places, len(rows), matrix.inputs, rounded, address)


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
