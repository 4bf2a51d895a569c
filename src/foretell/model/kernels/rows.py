"""What the native kernels do with the rows of a matrix."""

from collections.abc import Callable

import torch
from torch import Tensor

from foretell.model.kernels import build
from foretell.model.kernels.linear import expect, expect_count


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of float32 [t, d] with a float32 weight [d]; add Gemma's offset to the weight first."""
    expect(x, torch.float32, "x", *x.shape[:2])
    expect(weight, torch.float32, "weight", x.shape[1])
    y = torch.empty_like(x)
    threads = torch.get_num_threads()
    build.library().foretell_rms_norm(x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), *x.shape, threads)
    return y


def argmax(x: Tensor) -> Tensor:
    """Index of the largest number in each row of float32 [t, v], the lowest of equals; int64 [t].

    Numbers only, no NaN.
    """
    expect(x, torch.float32, "x", *x.shape[:2])
    index = torch.empty(x.shape[0], dtype=torch.int64)
    build.library().foretell_argmax(x.data_ptr(), index.data_ptr(), *x.shape, torch.get_num_threads())
    return index


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers in each row of float32 [t, v] and their indices, [t, k] each, descending; of equals the
    lower index first.
    """
    return _pick(build.library().foretell_topk, x, k)


def likeliest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same of scores, with probabilities under the softmax of their row."""
    return _pick(build.library().foretell_likeliest, x, k)


def _pick(kernel: Callable[..., None], x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    expect(x, torch.float32, "x", *x.shape[:2])
    expect_count(k, x.shape[1])
    values, index = torch.empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int64)
    kernel(x.data_ptr(), values.data_ptr(), index.data_ptr(), *x.shape, k, torch.get_num_threads())
    return values, index
