"""Labels and losses of Medusa's and blockwise heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

_NOT_DRAFTED_RANK = 1 << 30
"""Rank of a label that is not in the draft vocabulary."""


@dataclass(frozen=True)
class HeadLabels:
    """Positions whose hidden state the heads read, and the label of each head there."""

    row: Int[torch.Tensor, " n"]
    position: Int[torch.Tensor, " n"]
    token: Int[torch.Tensor, "n k"]
    """Draft index; -1: not to be learned (outside the answer, past the end, or not in the draft vocabulary)."""
    known: Bool[torch.Tensor, "n k"]
    """The head is evaluated here: the token belongs to an answer, in the draft vocabulary or not."""

    def cells(self, length: int) -> Int[torch.Tensor, "n k"]:
        """Index in the flattened `b * length` grid of the state whose distribution is that of each head's token."""
        ahead = self.position[:, None] + torch.arange(1, self.token.shape[1] + 1, device=self.position.device)
        return self.row[:, None] * length + ahead.clamp_max(length - 1)


def head_labels(
    token: Int[torch.Tensor, "b s"],
    loss_mask: Bool[torch.Tensor, "b s"],
    heads: int,
    draft_index: Int[torch.Tensor, " v"] | None = None,
    max_positions: int | None = None,
) -> HeadLabels:
    """Positions at which at least one head has something to learn, with the heads' labels.

    The state at position `t` produced token `t + 1`, so head `i` (from 0) predicts token `t + 2 + i`. `draft_index`:
    index of every token in the draft vocabulary, -1 for tokens that are not in it; None: all are. `max_positions`:
    draw at most so many of the positions.
    """
    s = token.shape[1]
    padded_token = F.pad(token, (0, heads + 1))
    padded_mask = F.pad(loss_mask, (0, heads + 1))
    ahead = torch.arange(2, heads + 2, device=token.device)
    positions = torch.arange(s, device=token.device)[:, None] + ahead
    known, label = padded_mask[:, positions], padded_token[:, positions]
    row, position = known.any(-1).nonzero(as_tuple=True)
    if max_positions is not None and len(row) > max_positions:
        drawn = torch.randperm(len(row))[:max_positions].sort().values.to(row.device)
        row, position = row[drawn], position[drawn]
    known, label = known[row, position], label[row, position]
    label = label if draft_index is None else draft_index[label]
    return HeadLabels(row, position, torch.where(known, label, -1), known)


def loss_weights(heads: int, decay: float = 0.8) -> list[float]:
    """Medusa's weight of each head's loss: `decay ** i` for head `i`, from 1 (arXiv 2401.10774, section 2.2.1)."""
    return [decay ** (i + 1) for i in range(heads)]


def cross_entropies(
    logits: Float[torch.Tensor, "n k w"],
    label: Int[torch.Tensor, "n k"],
) -> Float[torch.Tensor, " k"]:
    """Mean cross-entropy of each head in nats, over the positions whose label is not -1 (0 where there is none)."""
    n = torch.clamp_min((label >= 0).sum(0), 1)
    losses = F.cross_entropy(logits.float().flatten(0, 1), label.flatten(), ignore_index=-1, reduction="none")
    return losses.view(label.shape).sum(0) / n


def soft_cross_entropies(
    logits: Float[torch.Tensor, "n k w"], distribution: Float[torch.Tensor, "n k w"], mask: Bool[torch.Tensor, "n k"]
) -> Float[torch.Tensor, " k"]:
    """Mean cross-entropy of each head against the target's distributions, over the positions in `mask`."""
    losses = -(distribution * F.log_softmax(logits.float(), -1)).sum(-1)
    return (losses * mask).sum(0) / mask.sum(0).clamp_min(1)


@torch.no_grad()
def label_ranks(logits: Float[torch.Tensor, "n k w"], label: Int[torch.Tensor, "n k"]) -> Int[torch.Tensor, "n k"]:
    """Number of tokens with a higher logit than the label; `_NOT_DRAFTED_RANK` where the label is -1."""
    label_logit = logits.gather(-1, label.clamp_min(0)[..., None])
    return torch.where(label >= 0, (logits > label_logit).sum(-1), _NOT_DRAFTED_RANK)
