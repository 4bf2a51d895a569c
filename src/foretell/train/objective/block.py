"""Losses of blocks whose tokens are predicted in parallel: weights by place, and the confidence head's labels."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float

from foretell.distributions.divergence import total_variation
from foretell.train.objective.distillation import Objective, label_losses

Weighting = Literal["dpace", "decay"]
"""How the places of a block are weighted: by expected acceptance (D-PACE), or by a fixed exponential decay."""
_SMOOTHING = 0.5
"""Share of a probability in D-PACE's factors; the rest is 1, so that later places count before earlier ones are
learned."""
_DECAY_PLACES = {8: 4.0, 10: 5.0, 16: 7.0}
"""Places after which a weight falls by a factor of e, by block size (SpecForge's recipes)."""


def dpace_weights(
    probability: Float[torch.Tensor, "*n p"], mask: Bool[torch.Tensor, "*n p"]
) -> Float[torch.Tensor, "*n p"]:
    """Weights of D-PACE (arXiv 2605.18810) from the probabilities of the right tokens: the sum over this place and the
    later ones of the chance that a draft is accepted up to there. They fall along a block; 0 outside the mask.
    """
    reached = (_SMOOTHING * probability.detach() + 1 - _SMOOTHING).cumprod(-1) * mask
    return reached.flip(-1).cumsum(-1).flip(-1) * mask


def decay_weights(mask: Bool[torch.Tensor, "*n p"], block_size: int) -> Float[torch.Tensor, "*n p"]:
    """DFlash's weights (arXiv 2602.06036): they fall exponentially along a block; 0 outside the mask."""
    nearest = min(_DECAY_PLACES, key=lambda size: abs(size - block_size))
    place = torch.arange(mask.shape[-1], device=mask.device)
    return torch.exp(-place / _DECAY_PLACES[nearest]) * mask


def block_loss(
    losses: Float[torch.Tensor, " k"],
    right: Float[torch.Tensor, " k"],
    mask: Bool[torch.Tensor, "*n p"],
    weighting: Weighting,
    block_size: int,
) -> Float[torch.Tensor, ""]:
    """The weighted sum of the losses at the places of `mask`, per place; 0 for none.

    `right`: probability of the target's most probable token at these places.
    """
    grid = right.new_zeros(mask.shape).masked_scatter(mask, right.detach())
    weight = dpace_weights(grid, mask) if weighting == "dpace" else decay_weights(mask, block_size)
    return (losses * weight[mask]).sum() / max(1, len(losses))


def place_losses(
    draft: Float[torch.Tensor, "k w"], target: Float[torch.Tensor, "k w"], hard: float, objective: Objective
) -> tuple[Float[torch.Tensor, " k"], Float[torch.Tensor, " k"]]:
    """`label_losses` of every place, and the probability that the draft gives to the target's most probable token."""
    right = torch.softmax(draft.detach().float(), -1).gather(-1, target.argmax(-1, keepdim=True))[:, 0]
    return label_losses(draft, target, hard, objective), right


def confidence_loss(
    confidence: Float[torch.Tensor, " k"], draft: Float[torch.Tensor, "k w"], target: Float[torch.Tensor, "k w"]
) -> Float[torch.Tensor, ""]:
    """Binary cross-entropy of the confidence head's logits against the share of the draft's distribution that the
    target has too, one minus the total variation (DSpark, arXiv 2607.05147); 0 for `k = 0`.
    """
    label = 1 - total_variation(target.float(), draft.detach().float())
    loss = F.binary_cross_entropy_with_logits(confidence, label.clamp(0, 1), reduction="sum")
    return loss / max(1, len(label))
