"""Kernels for GPUs in Triton: attention, writing of pages, norms, sampling and acceptance. Nothing here imports it."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def has_triton(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    return device.type == "cuda" and _installed()


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels compute with a tensor: they give no gradients."""
    return has_triton(x.device) and not torch.is_grad_enabled()
