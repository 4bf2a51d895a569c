"""Argmax and top-k over the vocabulary, on the CPU kernels where they run, with torch elsewhere."""

import torch
from jaxtyping import Float, Int

from foretell.model.kernels import argmax as native_argmax
from foretell.model.kernels import runs_on
from foretell.model.kernels import topk as native_topk
from foretell.model.kernels import topk_softmax as native_likeliest


def argmax(scores: Float[torch.Tensor, "k v"]) -> Int[torch.Tensor, " k"]:
    """Highest-scoring token of every row; the lowest id among equals."""
    return native_argmax(scores) if runs_on(scores) else scores.argmax(-1)


def top_k(
    scores: Float[torch.Tensor, "k v"], count: int
) -> tuple[Float[torch.Tensor, "k c"], Int[torch.Tensor, "k c"]]:
    """Scores and ids of the `count` highest-scoring tokens of every row, in falling order."""
    if runs_on(scores):
        return native_topk(scores, count)
    top = scores.topk(count)
    return top.values, top.indices


def top_probabilities(
    scores: Float[torch.Tensor, "k v"], count: int
) -> tuple[Float[torch.Tensor, "k c"], Int[torch.Tensor, "k c"]]:
    """Softmax probabilities and ids of the `count` most probable tokens of every row, in falling order."""
    return native_likeliest(scores, count) if runs_on(scores) else top_k(torch.softmax(scores, -1), count)
