"""Weights in the order in which the kernels read them: panels of 32 outputs, one 32-bit word of the input at a time."""

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

LARGE_PAGE = 2 << 20


def interleave(gate_up: Tensor) -> Tensor:
    """Rows of a fused [2 * ffn, hidden] gate and up weight in turns of 16, so that a panel holds both sides of 16
    products.
    """
    width = gate_up.shape[1]
    halves = [pad(half, (0, 0, 0, -half.shape[0] % LANES)).view(-1, LANES, width) for half in gate_up.chunk(2)]
    return torch.stack(halves, 1).view(-1, width)


def pack(weight: Tensor, precision: Precision, kernels: ctypes.CDLL) -> Tensor:
    """Pack a [out, in] weight of any float type; returns bytes [panels, bytes of a panel].

    int8 weights are rotated first and carry one scale per output and group of inputs, after the group.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    weight = pad(weight.detach().to(dtype), (0, 0, 0, -weight.shape[0] % PANEL))
    if precision == "float32":
        return _panels(weight, 1)
    if precision == "bfloat16":
        return _panels(pad(weight, (0, weight.shape[1] % 2)), 2)
    weight = pad(weight, (0, -weight.shape[1] % INT8_BLOCK)).contiguous().clone()
    kernels.foretell_rotate(weight.data_ptr(), weight.numel())
    return torch.cat([_group(group) for group in torch.split(weight, INT8_GROUP, 1)], 1)


def pack_vector(vector: Tensor) -> Tensor:
    """Pad a bias to whole panels."""
    return pad(vector.detach().float(), (0, -vector.shape[0] % PANEL)).contiguous()


def together(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies of byte tensors, one after the other in large pages: streaming them takes fewer address look-ups."""
    sizes = [part.numel() for part in parts]
    copies = list(torch.split(_memory(sum(sizes)), sizes))
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part.view(-1))
    return copies


def _memory(size: int) -> Tensor:
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    start = -memory.data_ptr() % LARGE_PAGE
    return memory[start : start + size]


def _group(weight: Tensor) -> Tensor:
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (weight / scale).round().add(128).to(torch.uint8)
    return torch.cat([_panels(numbers, 4), scale.view(-1, PANEL).view(torch.uint8)], 1)


def _panels(numbers: Tensor, depth: int) -> Tensor:
    """[out, in] to bytes [out / 32, (in / depth, 32, depth)]."""
    outputs, inputs = numbers.shape
    words = numbers.view(outputs // PANEL, PANEL, inputs // depth, depth).transpose(1, 2)
    return words.contiguous().view(outputs // PANEL, -1).view(torch.uint8)
