"""Distillation of the target's distribution into a draft (DistillSpec, arXiv 2310.08461)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float

from foretell.distributions.divergence import Divergence, divergences, total_variation

Objective = Literal["cross_entropy", "reverse_kl", "jsd", "tvd", "tvd++", "nla", "lk_hybrid"]
"""What is learned from the target's distribution: cross-entropy for greedy decoding; for sampling, what speculative
sampling accepts, as total variation (`tvd`), its log (`nla`) or a mixture with cross-entropy (`lk_hybrid`).
"""
_DIVERGENCES = divergences()


def label_losses(
    draft: Float[torch.Tensor, "*k w"],
    target: Float[torch.Tensor, "*k w"],
    hard: float = 0.0,
    objective: Objective = "cross_entropy",
) -> Float[torch.Tensor, "*k"]:
    """The loss of the draft's logits at every position, from the target's logits there.

    A share `hard` of it is the cross-entropy against the target's most probable token, which greedy decoding needs.
    """
    log_q = torch.log_softmax(draft.float(), -1)
    loss = log_q.new_zeros(log_q.shape[:-1])
    if hard:
        best = target.argmax(-1)
        loss = -hard * log_q.gather(-1, best[..., None])[..., 0]
    if hard < 1 and objective == "cross_entropy":
        loss = loss - (1 - hard) * (torch.softmax(target.float(), -1) * log_q).sum(-1)
    elif hard < 1:
        loss = loss + (1 - hard) * _DIVERGENCES[objective](target, log_q)
    return loss


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
