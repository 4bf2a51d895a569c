"""Packs weights for the kernels: panels of 32 outputs, one 32-bit word of the input at a time."""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretell.model.kernels.structures import LANES, PANEL, Precision
from foretell.model.linear import INT8_BLOCK, INT8_GROUP

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on Linux."""


def interleave_gate_up(gate_up: Tensor) -> Tensor:
    """Interleave a fused [2 * ffn, hidden] gate and up weight in turns of 16 rows: a panel holds both factors of 16
    outputs.
    """
    width = gate_up.shape[1]
    parts = [pad(part, (0, 0, 0, -part.shape[0] % LANES)).view(-1, LANES, width) for part in gate_up.chunk(2)]
    return torch.stack(parts, 1).view(-1, width)


def pack_weight(weight: Tensor, precision: Precision, kernels: ctypes.CDLL) -> Tensor:
    """Pack a [out, in] weight of any float dtype; returns bytes [panels, bytes of a panel].

    int8 weights are rotated first and have one scale per output and group of inputs, stored after the group.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    weight = pad(weight.detach().to(dtype), (0, 0, 0, -weight.shape[0] % PANEL))
    if precision == "float32":
        return _panels(weight, 1)
    if precision == "bfloat16":
        return _panels(pad(weight, (0, weight.shape[1] % 2)), 2)
    weight = pad(weight, (0, -weight.shape[1] % INT8_BLOCK)).contiguous().clone()
    kernels.foretell_hadamard(weight.data_ptr(), weight.numel())
    return torch.cat([_quantize_group(group) for group in torch.split(weight, INT8_GROUP, 1)], 1)


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
