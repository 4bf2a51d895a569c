"""Attention during training of drafts that are predicted in one pass: DFlash's blocks and P-EAGLE's rollouts."""

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.block.attention import AttentionBackend
from foretell.model.training.chunked_attention import causal_attention


class BlockAttention(AttentionBackend):
    """Attention of blocks over sequences `[b, s]`: the slots of a block attend to the features before its anchor, and
    to each other. Blocks do not see one another (DFlash, arXiv 2602.06036).
    """

    def __init__(self, anchor: Int[torch.Tensor, "b a"]) -> None:
        self._anchor = anchor
        self._k, self._v = torch.empty(0), torch.empty(0)

    def set_context(self, k: Float[torch.Tensor, "b s g e"], v: Float[torch.Tensor, "b s g e"]) -> None:
        """Set the keys and values of the features for the layer that follows."""
        self._k, self._v = k, v

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "b n h e"],
        k: Float[torch.Tensor, "b n g e"],
        v: Float[torch.Tensor, "b n g e"],
        extra: Float[torch.Tensor, " h"] | None = None,
    ) -> Float[torch.Tensor, "b n he"]:
        """Attention of all slots, block after block."""
        return attend_in_blocks(q, k, v, self._k, self._v, self._anchor)


class RolloutAttention(AttentionBackend):
    """Attention over sequences of `length` positions, `[b, s]`, and rollouts of masks after them, in one tensor: the
    positions attend causally; the masks of a rollout attend to the positions up to its anchor and to the masks before
    them. Rollouts do not see one another (P-EAGLE, arXiv 2602.01469; PARD, arXiv 2504.18583).
    """

    def __init__(self, length: int, anchor: Int[torch.Tensor, "b a"]) -> None:
        self._length, self._anchor = length, anchor

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "b n h e"],
        k: Float[torch.Tensor, "b n g e"],
        v: Float[torch.Tensor, "b n g e"],
        extra: Float[torch.Tensor, " h"] | None = None,
    ) -> Float[torch.Tensor, "b n he"]:
        """Attention of all positions, then of all masks, rollout after rollout."""
        s, scale = self._length, q.shape[-1] ** -0.5
        read_q, read_k, read_v = (part[:, :s] for part in (q, k, v))
        context = causal_attention(read_q.transpose(1, 2), read_k.transpose(1, 2), read_v.transpose(1, 2), scale)
        own_q, own_k, own_v = (part[:, s:] for part in (q, k, v))
        masks = attend_in_blocks(own_q, own_k, own_v, read_k, read_v, self._anchor + 1, causal=True)
        return torch.cat((context.transpose(1, 2).flatten(2), masks), 1)


def attend_in_blocks(
    q: Float[torch.Tensor, "b n h e"],
    k: Float[torch.Tensor, "b n g e"],
    v: Float[torch.Tensor, "b n g e"],
    context_k: Float[torch.Tensor, "b s g e"],
    context_v: Float[torch.Tensor, "b s g e"],
    seen: Int[torch.Tensor, "b a"],
    causal: bool = False,
) -> Float[torch.Tensor, "b n he"]:
    """Attention of `n` slots, `n / a` in each block: to the first `seen` positions of the context, and to the slots of
    the own block, with `causal` to no later ones.
    """
    (b, n, h, e), g, (_, a), s = q.shape, k.shape[2], seen.shape, context_k.shape[1]
    slots = n // a
    grouped = (q * e**-0.5).unflatten(2, (g, h // g)).permute(0, 2, 3, 1, 4)
    own_k, own_v = (part.transpose(1, 2).unflatten(2, (a, slots))[:, :, None] for part in (k, v))
    before = (grouped.flatten(2, 3) @ context_k.permute(0, 2, 3, 1)).view(b, g, h // g, a, slots, s)
    within = grouped.unflatten(3, (a, slots)) @ own_k.transpose(-1, -2)
    if causal:
        later = torch.ones(slots, slots, dtype=torch.bool, device=q.device).triu(1)
        within = within.masked_fill(later, float("-inf"))
    score = torch.cat((before.masked_fill(_hidden(seen, s), float("-inf")), within), -1)
    weight = score.softmax(-1, dtype=v.dtype)
    out = (weight[..., :s].reshape(b, g, -1, s) @ context_v.transpose(1, 2)).view(b, g, h // g, a, slots, e)
    out = out + weight[..., s:] @ own_v
    merged: torch.Tensor = out.permute(0, 3, 4, 1, 2, 5).reshape(b, n, h * e)
    return merged


def _hidden(seen: Int[torch.Tensor, "b a"], s: int) -> Bool[torch.Tensor, "b 1 1 a 1 s"]:
    position = torch.arange(s, device=seen.device)
    return (position >= seen[..., None])[:, None, None, :, None]
