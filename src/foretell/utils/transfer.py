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
    """Copies of tensors of one device on the host, which waits for them once; on the host the tensors themselves."""
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    if len(tensors) == 1:
        return [tensors[0].cpu()]
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())  # Each begins at a multiple of its size.
    parts = [tensors[i].reshape(-1).view(torch.uint8) for i in order]
    whole = torch.cat(parts).cpu().split([len(part) for part in parts])
    out = [whole[0]] * len(tensors)
    for i, part in zip(order, whole, strict=True):
        out[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
    return out
