"""The best tokens of many scores: the CPU kernels where they run, torch elsewhere."""

import torch
from jaxtyping import Float, Int

from foretell.model.kernels import argmax as native_argmax
from foretell.model.kernels import available
from foretell.model.kernels import topk as native_topk
from foretell.model.kernels import topk_softmax as native_likeliest


def argmax(scores: Float[torch.Tensor, "k v"]) -> Int[torch.Tensor, " k"]:
    """Best token of every row; the lowest id where several tie."""
    return native_argmax(scores) if _fast(scores) else scores.argmax(-1)


def best(scores: Float[torch.Tensor, "k v"], count: int) -> tuple[Float[torch.Tensor, "k c"], Int[torch.Tensor, "k c"]]:
    """Scores and ids of the `count` best tokens of every row, best first."""
    if _fast(scores):
        return native_topk(scores, count)
    top = scores.topk(count)
    return top.values, top.indices


def likeliest(
    scores: Float[torch.Tensor, "k v"], count: int
) -> tuple[Float[torch.Tensor, "k c"], Int[torch.Tensor, "k c"]]:
    """Probabilities, under the softmax of its row, and ids of the `count` best tokens of every row, best first."""
    return native_likeliest(scores, count) if _fast(scores) else best(torch.softmax(scores, -1), count)


def _fast(scores: torch.Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.is_contiguous() and available()
