"""Kernels for the rows of a matrix: RMS norm, argmax and top-k."""

from collections.abc import Callable

import torch
from torch import Tensor

from foretell.model.kernels import build
from foretell.model.kernels.linear import check_k, check_tensor


def runs_on(x: Tensor) -> bool:
    """Whether the kernels are available and read a tensor of this kind: contiguous float32 on the CPU."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and build.available()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of float32 [t, d] with a float32 weight [d]; add Gemma's offset to the weight first."""
    check_tensor(x, torch.float32, "x", *x.shape[:2])
    check_tensor(weight, torch.float32, "weight", x.shape[1])
    y = torch.empty_like(x)
    threads = torch.get_num_threads()
    build.library().foretell_rms_norm(x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), *x.shape, threads)
    return y


def argmax(x: Tensor) -> Tensor:
    """Index of the largest number in each row of float32 [t, v] without NaN, the lowest of equals; int64 [t]."""
    check_tensor(x, torch.float32, "x", *x.shape[:2])
    index = torch.empty(x.shape[0], dtype=torch.int64)
    build.library().foretell_argmax(x.data_ptr(), index.data_ptr(), *x.shape, torch.get_num_threads())
    return index


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers in each row of float32 [t, v] and their indices, [t, k] each, descending; of equals the
    lower index first.
    """
    return _select(build.library().foretell_topk, x, k)


def topk_softmax(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits in each row, as probabilities under the softmax of the row, and their indices."""
    return _select(build.library().foretell_topk_softmax, x, k)


def _select(kernel: Callable[..., None], x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_tensor(x, torch.float32, "x", *x.shape[:2])
    check_k(k, x.shape[1])
    values, index = torch.empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int64)
    kernel(x.data_ptr(), values.data_ptr(), index.data_ptr(), *x.shape, k, torch.get_num_threads())
    return values, index
