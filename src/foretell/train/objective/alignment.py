"""Objectives that align unrolled training with decoding: those of HASS, GRIFFIN and CORAL, for EAGLE's layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

_TEMPERATURE = 0.07
"""Divisor of the cosines in CORAL's contrastive loss."""
_CONTRASTED_TOKENS = 256
"""Maximum number of random tokens of a batch in CORAL's contrastive loss."""


def top_k_losses(
    draft: Float[torch.Tensor, "k w"], target: Float[torch.Tensor, "k w"], count: int
) -> Float[torch.Tensor, " k"]:
    """HASS's ranking distillation (arXiv 2408.15766) at every position: the cross-entropy's terms of the target's
    `count` most probable tokens. `draft` and `target` are logits.
    """
    probability, index = torch.softmax(target.float(), -1).topk(min(count, target.shape[-1]), -1)
    return -(probability * torch.log_softmax(draft.float(), -1).gather(-1, index)).sum(-1)


class DraftedPaths:
    """The positions from which a tree with the `width` best tokens at every step contains the text so far, the only
    ones at which GRIFFIN (arXiv 2502.11018) learns further steps.

    `width`: 0: all positions always count. `shape`: sequences and positions.
    """

    def __init__(self, width: int, shape: tuple[int, ...], device: torch.device) -> None:
        self._width, self._drafted = width, torch.ones(shape, dtype=torch.bool, device=device)

    def at(self, mask: Bool[torch.Tensor, "b t"]) -> Bool[torch.Tensor, " k"]:
        """Which of the positions in a mask are left."""
        return self._drafted[mask]

    def advance(
        self,
        mask: Bool[torch.Tensor, "b t"],
        draft: Float[torch.Tensor, "k w"],
        columns: Int[torch.Tensor, " w"],
        text: Int[torch.Tensor, "b t"],
    ) -> None:
        """Leave out positions at which the draft's best tokens do not contain the text's.

        `draft`: logits at the positions of `mask`; all others are left out, too. `columns`: token of every column.
        `text`: token that is predicted at every position.
        """
        if not self._width:
            return
        best = columns[draft.detach().topk(min(self._width, draft.shape[-1]), -1).indices]
        hit = torch.zeros_like(mask)
        hit[mask] = (best == text[mask][:, None]).any(-1)
        self._drafted &= hit


def contrastive_loss(
    states: Float[torch.Tensor, "k d"], label: Int[torch.Tensor, " k"], temperature: float = _TEMPERATURE
) -> Float[torch.Tensor, ""]:
    """The supervised contrastive loss (Khosla et al., arXiv 2004.11362) of states, by cosine: of every state whose
    label another one has, the mean over those of minus the log of their share among all other states; 0 for none.
    """
    unit = F.normalize(states.float(), dim=-1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    log_share = torch.log_softmax((unit @ unit.T / temperature).masked_fill(itself, -1 / temperature**2 - 100), -1)
    same = (label[:, None] == label) & ~itself
    count = same.sum(-1)
    total = -(torch.where(same, log_share, 0.0).sum(-1) / count.clamp(min=1)).sum()
    return total / (count > 0).sum().clamp(min=1)


def cross_step_loss(
    states: Sequence[Float[torch.Tensor, "_ d"]], masks: Sequence[Bool[torch.Tensor, "b t"]]
) -> Float[torch.Tensor, ""]:
    """CORAL's cross-step representation alignment (arXiv 2502.16880): the outputs of all steps that predict the same
    token of the batch are to be alike, and unlike those for other tokens. At most 256 random tokens are compared.

    `states`: outputs of each step at the positions of its mask; step `i` at position `j` predicts token `j + 2 + i`.
    """
    b, t = masks[0].shape
    token = torch.arange(b * (t + len(masks)), device=masks[0].device).view(b, -1)[:, :t]
    label = torch.cat([(token + i)[mask] for i, mask in enumerate(masks)])
    kept = torch.isin(label, _drawn(torch.unique(label)))
    return contrastive_loss(torch.cat(list(states))[kept], label[kept])


def _drawn(values: Int[torch.Tensor, " n"]) -> Int[torch.Tensor, " m"]:
    """At most `_CONTRASTED_TOKENS` of them, by torch's global generator."""
    return values[torch.randperm(len(values))[:_CONTRASTED_TOKENS].to(values.device)]
