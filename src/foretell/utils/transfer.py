"""Copies between the host and a device. A blocking copy waits for all that the device has been given to do, so a step
makes one: it brings all that the host needs to know.
"""

from collections.abc import Sequence

import numpy as np
import torch


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
