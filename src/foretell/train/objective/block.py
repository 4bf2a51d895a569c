"""Blocks whose tokens are predicted in parallel: random anchors, weights by place, the confidence head's labels."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.distributions.divergence import total_variation
from foretell.train.objective.distillation import Objective, label_losses
from foretell.train.objective.unrolled import TargetLabels

Weighting = Literal["dpace", "decay", "uniform"]
"""Weights of the places of a block: by expected acceptance (D-PACE), by an exponential decay, or alike (JetSpec)."""
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
    weight = mask.to(losses.dtype)
    if weighting != "uniform":
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


def sample_blocks(
    labels: TargetLabels, count: int, depth: int
) -> tuple[Int[torch.Tensor, "b a"], Int[torch.Tensor, "b a p"]]:
    """At most `count` random anchors per text, and the rows of the labels of the places after them, -1: none.

    An anchor has a label after it and a position before it. A place has a label only if all places before it have one.
    Texts with fewer anchors than others are filled with blocks without labels. torch's global generator is seeded at
    every step.
    """
    possible = _possible_anchors(labels)
    most = int(possible.sum(1).max()) if possible.numel() else 0
    order = torch.rand(possible.shape, device="cpu").to(possible.device).masked_fill(~possible, -1.0)
    anchor = order.topk(min(count, max(most, 1)), -1).indices
    place = anchor[..., None] + torch.arange(depth, device=anchor.device)
    row = F.pad(labels.row, (0, depth), value=-1).gather(1, place.flatten(1)).view(place.shape)
    seen = ((row >= 0) & possible.gather(1, anchor)[..., None]).long().cumprod(-1).bool()
    return anchor, torch.where(seen, row, -1)


def _possible_anchors(labels: TargetLabels) -> Bool[torch.Tensor, "b t"]:
    possible = labels.row >= 0
    possible[:, :1] = False
    return possible
