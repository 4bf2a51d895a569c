"""Packs weights for the kernels: panels of 32 outputs, one 32-bit word of the input at a time."""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretell.model.kernels.structures import LANES, PANEL, PANEL_KINDS, Precision
from foretell.model.linear import INT8_BLOCK, INT8_GROUP
from foretell.model.stored_matrix import StoredMatrix, widen_rows

Matrix = Tensor | StoredMatrix
"""A matrix [out, in] in any float dtype, or as its checkpoint stores it."""

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on Linux."""


@dataclass(frozen=True)
class PackedWeight:
    """Outputs of a linear layer that are packed alike."""

    data: Tensor
    """Bytes, [panels, bytes of a panel]."""
    inputs: int
    outputs: int
    kind: str
    """One of `PANEL_KINDS`."""
    operand: Precision
    """What the inputs of the product are rounded to; one of `structures.OPERANDS`."""


def pack_rows(parts: Sequence[Matrix], precision: Precision, kernels: ctypes.CDLL) -> list[PackedWeight]:
    """Pack matrices of the same inputs, one below the other; neighbours of one kind become one weight.

    Quantised matrices keep their blocks, unless the precision is int8 or a part would end within a panel.
    """
    stored = [part if isinstance(part, StoredMatrix) else StoredMatrix.of(part) for part in parts]
    if precision == "int8" or not all(m.quantized for m in stored) or any(m.outputs % PANEL for m in stored[:-1]):
        return [pack_floats(widen_rows(stored), precision, kernels)]
    return [pack_blocks(list(same), precision, kernels) for _, same in groupby(stored, key=lambda m: m.kind)]


def pack_gate_up(gate: Matrix, up: Matrix, precision: Precision, kernels: ctypes.CDLL) -> PackedWeight:
    """Pack gate and up in turns of 16 rows: a panel holds both factors of 16 outputs."""
    pair = [part if isinstance(part, StoredMatrix) else StoredMatrix.of(part) for part in (gate, up)]
    order = _interleaved(pair[0].outputs)
    if precision != "int8" and pair[0].quantized and pair[0].kind == pair[1].kind:
        return pack_blocks(pair, precision, kernels, order)
    rows = pad(widen_rows(pair), (0, 0, 0, 1))  # index -1 is a row of zeros
    return pack_floats(rows[order], precision, kernels)


def _interleaved(width: int) -> Tensor:
    """Rows of gate (0 .. width - 1) and up (from `width` on) in turns of 16; -1: a row of zeros."""
    gate = pad(torch.arange(width), (0, -width % LANES), value=-1)
    up = torch.where(gate < 0, -1, gate + width)
    return torch.stack([gate.view(-1, LANES), up.view(-1, LANES)], 1).flatten()


def pack_blocks(
    parts: Sequence[StoredMatrix], precision: Precision, kernels: ctypes.CDLL, order: Tensor | None = None
) -> PackedWeight:
    """Pack quantised matrices of one kind, one below the other, without changing their numbers.

    `order`: the rows of the result as rows of the parts, -1 for a row of zeros; None: all rows as they are.
    """
    data = parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts])
    data = data.contiguous()
    order = torch.arange(len(data)) if order is None else order.contiguous()
    kind, inputs = parts[0].kind, parts[0].inputs
    number = PANEL_KINDS.index(kind)
    panels = torch.empty(-(-len(order) // PANEL), 4 * kernels.foretell_panel_words(number, inputs), dtype=torch.uint8)
    kernels.foretell_pack_blocks(
        *(number, data.data_ptr(), data.shape[1], order.data_ptr(), len(order), inputs, panels.data_ptr()),
        torch.get_num_threads(),
    )
    return PackedWeight(panels, inputs, len(order), kind, precision)


def pack_floats(weight: Tensor, precision: Precision, kernels: ctypes.CDLL) -> PackedWeight:
    """Pack a [out, in] weight of any float dtype in a precision; with int8 activations, in bfloat16.

    int8 weights are rotated first and have one scale per output and group of inputs, stored after the group.
    """
    outputs, inputs = weight.shape
    operand: Precision = "bfloat16" if precision == "int8-activations" else precision
    dtype = torch.bfloat16 if operand == "bfloat16" else torch.float32
    weight = pad(weight.detach().to(dtype), (0, 0, 0, -outputs % PANEL))
    if operand == "float32":
        return PackedWeight(_panels(weight, 1), inputs, outputs, "F32", operand)
    if operand == "bfloat16":
        return PackedWeight(_panels(pad(weight, (0, inputs % 2)), 2), inputs, outputs, "BF16", operand)
    weight = pad(weight, (0, -inputs % INT8_BLOCK)).contiguous().clone()
    kernels.foretell_hadamard(weight.data_ptr(), weight.numel())
    groups = torch.cat([_quantize_group(group) for group in torch.split(weight, INT8_GROUP, 1)], 1)
    return PackedWeight(groups, inputs, outputs, "int8", operand)


def pad_bias(vector: Tensor) -> Tensor:
    """Pad a bias to whole panels."""
    return pad(vector.detach().float(), (0, -vector.shape[0] % PANEL)).contiguous()


def copy_to_huge_pages(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copy byte tensors into one block of huge pages, which takes fewer TLB misses to stream."""
    sizes = [part.numel() for part in parts]
    copies = list(torch.split(_allocate(sum(sizes)), sizes))
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part.view(-1))
    return copies


def _allocate(size: int) -> Tensor:
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a Linux kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + size]


def _quantize_group(weight: Tensor) -> Tensor:
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (weight / scale).round().add(128).to(torch.uint8)
    return torch.cat([_panels(levels, 4), scale.view(-1, PANEL).view(torch.uint8)], 1)


def _panels(numbers: Tensor, depth: int) -> Tensor:
    """[out, in] to bytes [out / 32, (in / depth, 32, depth)]."""
    outputs, inputs = numbers.shape
    words = numbers.view(outputs // PANEL, PANEL, inputs // depth, depth).transpose(1, 2)
    return words.contiguous().view(outputs // PANEL, -1).view(torch.uint8)
