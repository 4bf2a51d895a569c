"""Labels of look-ahead embeddings (PaSS, arXiv 2311.13581)."""

import torch
from jaxtyping import Bool, Float, Int


def sample_cut_points(
    loss_mask: Bool[torch.Tensor, "b s"], count: int, score: Float[torch.Tensor, "b s"]
) -> Int[torch.Tensor, "b g"]:
    """Per sequence up to `count` distinct positions after which to look ahead.

    A position can be chosen if the token two positions later is to be learned; those of the highest `score` are. Where
    a sequence has fewer, the remaining positions have no labels.
    """
    allowed = torch.zeros_like(loss_mask)
    allowed[:, :-2] = loss_mask[:, 2:]
    return torch.where(allowed, score, -1.0).topk(min(count, loss_mask.shape[1]), dim=1).indices


def look_ahead_labels(
    token: Int[torch.Tensor, "b s"],
    loss_mask: Bool[torch.Tensor, "b s"],
    cut: Int[torch.Tensor, "b g"],
    ahead: int,
    draft_index: Int[torch.Tensor, " v"] | None = None,
) -> Int[torch.Tensor, "b g l"]:
    """Label of vector `i` (from 0) after each cut point: the token at `cut + 2 + i`; -1: none.

    A cut point has no labels if its first one is not to be learned. `draft_index`: index of every token in the draft
    vocabulary, -1 for tokens that are not in it; None: all are.
    """
    s = token.shape[1]
    position = cut[:, :, None] + 2 + torch.arange(ahead, device=cut.device)
    flat = position.clamp(max=s - 1).flatten(1)
    learned = loss_mask.gather(1, flat).view(position.shape) & (position < s)
    label = token.gather(1, flat).view(position.shape)
    return torch.where(learned & learned[:, :, :1], label if draft_index is None else draft_index[label], -1)
