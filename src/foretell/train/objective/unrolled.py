"""EAGLE-3's training-time test: the target's distribution is the label of every unrolled step (arXiv 2503.01840)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import TokenSubset
from foretell.train.objective.candidates import sample_candidates
from foretell.train.objective.distillation import Objective, label_losses
from foretell.train.objective.target_head import TargetHead

LogitPair = tuple[Float[torch.Tensor, "_ w"], Float[torch.Tensor, "_ w"]]
"""The draft's and the target's logits over the draft vocabulary at the same positions."""


def mean_loss(
    draft: Float[torch.Tensor, "k w"],
    target: Float[torch.Tensor, "k w"],
    hard: float = 0.0,
    objective: Objective = "cross_entropy",
) -> Float[torch.Tensor, ""]:
    """The mean of `label_losses`; 0 for `k = 0`."""
    return label_losses(draft, target, hard, objective).sum() / max(1, len(draft))


def unrolled_loss(
    steps: Sequence[LogitPair], decay: float = 0.8, hard: float = 0.0, objective: Objective = "cross_entropy"
) -> Float[torch.Tensor, ""]:
    """Sum over steps of `decay ** i` times the loss of step `i`."""
    losses = [decay**i * mean_loss(draft, target, hard, objective) for i, (draft, target) in enumerate(steps)]
    return torch.stack(losses).sum()


def top1_agreement(draft: Float[torch.Tensor, "k w"], target: Float[torch.Tensor, "k w"]) -> float:
    """Share of positions at which both have the same most probable token; 0 for `k = 0`."""
    if not len(draft):
        return 0.0
    return float((draft.argmax(-1) == target.argmax(-1)).float().mean())


@dataclass(frozen=True)
class TargetLabels:
    """The target's logits at the positions that have a label.

    `row[b, p]` is the row of `logits` for the distribution of token `p + 1` of sequence `b`; -1: that token is not to
    be learned or not in the draft vocabulary.
    """

    row: Int[torch.Tensor, "b t"]
    logits: Float[torch.Tensor, "k w"]
    covered: float
    """Share of the tokens to be learned that are in the draft vocabulary."""
    candidates: TokenSubset | None = None
    """The part of the draft vocabulary that `logits` cover; None: all of it."""

    def shifted(self, offset: int) -> tuple[Bool[torch.Tensor, "b t"], Float[torch.Tensor, "l w"]]:
        """The positions with a label `offset` positions later, and these labels in the order of the positions."""
        row = F.pad(self.row[:, offset:], (0, min(offset, self.row.shape[1])), value=-1)
        mask = row >= 0
        return mask, self.logits[row[mask]]

    def with_candidates(self, count: int) -> "TargetLabels":
        """The same labels over `count` candidates; 0: over the whole draft vocabulary."""
        candidates = sample_candidates(torch.softmax(self.logits, -1), count) if count else None
        return (
            self if candidates is None else replace(self, logits=candidates.select(self.logits), candidates=candidates)
        )


@torch.no_grad()
def target_labels(
    state: Float[torch.Tensor, "b s d"],
    token: Int[torch.Tensor, "b s"],
    loss_mask: Bool[torch.Tensor, "b s"],
    embedding_and_head: EmbeddingAndHead,
    draft_tokens: Int[torch.Tensor, " w"] | None,
) -> TargetLabels:
    """The target's logits over the draft vocabulary wherever the next token is to be learned and in that vocabulary.

    `state`: input of the target's head. `draft_tokens`: the draft vocabulary; None: all tokens. The paper requires the
    target's most probable token to be in the draft vocabulary, which needs logits over the whole vocabulary; on
    sequences that the target wrote, the two conditions are nearly the same.
    """
    mask = loss_mask[:, 1:].clone()
    if draft_tokens is not None:
        drafted = torch.zeros(embedding_and_head.vocab, dtype=torch.bool, device=token.device)
        drafted[draft_tokens] = True
        mask &= drafted[token[:, 1:]]
    logits = TargetHead(embedding_and_head, draft_tokens)(state[:, :-1][mask])
    row = torch.full(mask.shape, -1, device=state.device)
    row[mask] = torch.arange(len(logits), device=state.device)
    num_learned = int(loss_mask[:, 1:].sum())
    return TargetLabels(row, logits, len(logits) / num_learned if num_learned else 0.0)
