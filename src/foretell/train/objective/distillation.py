"""Distillation of the target's distribution into a draft model (DistillSpec, arXiv 2310.08461)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.distributions.divergence import Divergence, total_variation


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a batch, with metrics of the draft (detached)."""

    loss: Float[torch.Tensor, ""]
    acceptance: float
    """Mean probability that speculative sampling accepts a token: one minus the total variation."""
    top1: float
    """Share of positions at which both models have the same most probable token."""


def distillation_loss(
    target: Float[torch.Tensor, "k w"],
    draft: Float[torch.Tensor, "k w"],
    divergence: Divergence,
    weight: Float[torch.Tensor, " k"] | None = None,
) -> DistillationLoss:
    """The weighted mean of a divergence over `k` positions; zero, with a gradient, for `k = 0`.

    `target` and `draft` are logits. `weight`: of each position; None: equal.
    """
    weight = draft.new_ones(len(draft)) if weight is None else weight.to(draft.dtype)
    total = weight.sum().clamp_min(1e-9)
    loss = (divergence(target, draft) * weight).sum() / total
    with torch.no_grad():
        acceptance = ((1 - total_variation(target, draft)) * weight).sum() / total
        top1 = ((target.argmax(-1) == draft.argmax(-1)).to(weight.dtype) * weight).sum() / total
    return DistillationLoss(loss, float(acceptance), float(top1))
