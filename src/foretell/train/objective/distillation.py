"""Distillation of a draft's distribution into the target's: a divergence averaged over the positions that count."""

from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.distributions.divergence import Divergence, total_variation


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a batch, and how good the draft is there (detached)."""

    loss: Float[torch.Tensor, ""]
    acceptance: float
    """Mean chance that speculative sampling accepts a token: one minus the total variation."""
    top1: float
    """Share of positions where both models' best token is the same."""


def distillation_loss(
    target: Float[torch.Tensor, "k w"],
    draft: Float[torch.Tensor, "k w"],
    divergence: Divergence,
    weight: Float[torch.Tensor, " k"] | None = None,
) -> DistillationLoss:
    """The weighted mean of a divergence over `k` positions (DistillSpec, arXiv 2310.08461); zero, with a gradient,
    where there is none.

    `target` and `draft` hold logits. `weight`: what each position counts; None: the same.
    """
    weight = draft.new_ones(len(draft)) if weight is None else weight.to(draft.dtype)
    total = weight.sum().clamp_min(1e-9)
    loss = (divergence(target, draft) * weight).sum() / total
    with torch.no_grad():
        acceptance = ((1 - total_variation(target, draft)) * weight).sum() / total
        top1 = ((target.argmax(-1) == draft.argmax(-1)).to(weight.dtype) * weight).sum() / total
    return DistillationLoss(loss, float(acceptance), float(top1))
