"""What look-ahead embeddings learn from: places of a text after which to look ahead, and what is to be said there."""

import torch
from jaxtyping import Bool, Float, Int


def sample_cut_points(
    loss_mask: Bool[torch.Tensor, "b s"], count: int, score: Float[torch.Tensor, "b s"]
) -> Int[torch.Tensor, "b g"]:
    """Per text up to `count` different places after which to look ahead, the highest of `drawn` among those whose token
    two places on is an answer's.

    Where a text has fewer, the others are places that teach nothing: what follows two places on is not to be learned.
    """
    able = torch.zeros_like(loss_mask)
    able[:, :-2] = loss_mask[:, 2:]
    return torch.where(able, score, -1.0).topk(min(count, loss_mask.shape[1]), dim=1).indices


def look_ahead_labels(
    token: Int[torch.Tensor, "b s"],
    loss_mask: Bool[torch.Tensor, "b s"],
    cut: Int[torch.Tensor, "b g"],
    ahead: int,
    draft_index: Int[torch.Tensor, " v"] | None = None,
) -> Int[torch.Tensor, "b g l"]:
    """What vector `i` (from 0) of each group is to say: the token at `cut + 2 + i` (PaSS, arXiv 2311.13581); -1:
    nothing.

    A group learns nothing where its first token is no answer's. `number`: each token's place among the drafted ones, -1
    for the others (None: all are drafted).
    """
    s = token.shape[1]
    place = cut[:, :, None] + 2 + torch.arange(ahead, device=cut.device)
    flat = place.clamp(max=s - 1).flatten(1)
    known = loss_mask.gather(1, flat).view(place.shape) & (place < s)
    guess = token.gather(1, flat).view(place.shape)
    return torch.where(known & known[:, :, :1], guess if draft_index is None else draft_index[guess], -1)
