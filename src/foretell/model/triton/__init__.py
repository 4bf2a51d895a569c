"""Kernels for GPUs in Triton: attention, writing of pages, norms, sampling and acceptance. Nothing here imports it."""

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from foretell.model.triton.launch import Launch

T = TypeVar("T")

BATCH_INVARIANT = "FORETELL_BATCH_INVARIANT"
"""Environment variable: 1 asks for matrix products by an own kernel on GPUs, with the same bits in every batch."""


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def has_triton(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    return device.type == "cuda" and _installed()


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels compute with a tensor: they give no gradients."""
    return has_triton(x.device) and not torch.is_grad_enabled()


@cache
def batch_invariant() -> bool:
    """Whether the environment asks for products whose rows do not depend on each other."""
    return os.environ.get(BATCH_INVARIANT, "0") != "0"


def run(launched: "tuple[Launch, T]") -> T:
    """Run a launch; its output."""
    launch, out = launched
    launch.run()
    return out
