"""Copies between the host and a device. A blocking copy waits for all that the device has been given to do, so a step
makes one: it brings all that the host needs to know.
"""

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of as many bytes as a number."""


def to_device(x: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, without waiting: its numbers are taken before the call returns."""
    return (torch.from_numpy(x) if isinstance(x, np.ndarray) else x).to(device, non_blocking=True)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the host, which waits once for those that lie on a device, all of them on the same one."""
    out = list(tensors)
    away = [i for i, t in enumerate(tensors) if t.device.type != "cpu"]
    if len(away) == 1:
        out[away[0]] = out[away[0]].cpu()
    elif away:
        away.sort(key=lambda i: -out[i].element_size())  # So that each begins at a multiple of its size.
        parts = [out[i].reshape(-1).view(torch.uint8) for i in away]
        whole = torch.cat(parts).cpu().split_with_sizes([len(part) for part in parts])
        for i, part in zip(away, whole, strict=True):
            out[i] = part.view(out[i].dtype).view(out[i].shape)
    return out


def movable_view(tensor: torch.Tensor) -> Any:
    """A tensor's memory, to be indexed and copied: on the CPU a NumPy view as integers, which takes a third of torch's
    time.
    """
    return tensor.view(_INTEGER[tensor.element_size()]).numpy() if tensor.device.type == "cpu" else tensor


def lazy_zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype and on the device of a tensor; on the CPU what is never written takes no memory."""
    if like.device.type != "cpu":
        return like.new_zeros(*shape)
    size = max(1, math.prod(shape)) * like.element_size()
    if sys.platform == "win32":
        memory = mmap.mmap(-1, size)
    else:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MB would be taken whole for its first byte
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)[: math.prod(shape)].view(*shape)
