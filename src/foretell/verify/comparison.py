"""How far next-token distributions are from those of another copy of a model, on a text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.distributions.divergence import forward_kl, total_variation

Tensor = torch.Tensor
_MAX_EXPONENT = 700.0
"""Above it, the exponential is beyond float64."""


@dataclass(frozen=True)
class Comparison:
    """A quantised model beside its source, over all positions of a text."""

    tokens: int
    kl: float
    """Mean KL(source || quantised) of the next token, in nats."""
    kl_99: float
    """99th percentile of the KL divergence."""
    total_variation: float
    """Mean total variation distance of the two distributions, 0..1."""
    same_top: float
    """Share of positions where both find the same token most probable."""
    perplexity: float
    """Of the source."""
    quantized_perplexity: float


def compare_logits(
    parts: Iterable[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]],
) -> Comparison:
    """Compare logits of the source and of the quantised model, given with the tokens that follow in the text."""
    kl, variation, same = list[Tensor](), 0.0, 0
    losses = [0.0, 0.0]
    for p, q, targets in parts:
        kl.append(forward_kl(p, q).clamp(min=0))
        variation += float(total_variation(p, q).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        for i, logits in enumerate((p, q)):
            losses[i] += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    every = torch.cat(kl).double()
    count = len(every)
    return Comparison(
        count,
        float(every.mean()),
        float(np.quantile(every.numpy(), 0.99)),
        variation / count,
        same / count,
        *(perplexity(loss / count) for loss in losses),
    )


def perplexity(loss: float) -> float:
    """The perplexity of a mean cross-entropy in nats, kept finite."""
    return math.exp(min(loss, _MAX_EXPONENT))
