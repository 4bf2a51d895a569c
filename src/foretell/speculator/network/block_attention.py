"""Attention during training of drafts that are predicted in one pass: DFlash's blocks and P-EAGLE's rollouts."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.block.attention import AttentionBackend, HeadScores, Keys, Merged, Queries
from foretell.model.training.chunked_attention import causal_attention
from foretell.speculator.network.layer import no_window


class BlockAttention(AttentionBackend):
    """Attention of blocks over sequences `[b, s]`: the slots of a block attend to the features before its anchor, and
    to each other. Blocks do not see one another (DFlash, arXiv 2602.06036).

    In layers with a window, `window_of`, slots attend to no later slots if `causal`, and the window is counted back
    from the anchor for all slots if `from_anchor`, else from every slot.
    """

    def __init__(
        self,
        anchor: Int[torch.Tensor, "b a"],
        window_of: Callable[[int], int] = no_window,
        causal: bool = False,
        from_anchor: bool = False,
    ) -> None:
        self._anchor, self._window_of, self._causal, self._from_anchor = anchor, window_of, causal, from_anchor
        self._k, self._v = torch.empty(0), torch.empty(0)

    def set_context(self, k: Float[torch.Tensor, "b s g e"], v: Float[torch.Tensor, "b s g e"]) -> None:
        """Set the keys and values of the features for the layer that follows."""
        self._k, self._v = k, v

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Attention of all slots, block after block."""
        window = self._window_of(layer)
        causal = self._causal and window > 0
        return attend_in_blocks(
            q, k, v, self._k, self._v, self._anchor, causal, window, extra, from_anchor=self._from_anchor
        )


class RolloutAttention(AttentionBackend):
    """Attention over sequences of `length` positions, `[b, s]`, and rollouts of masks after them, in one tensor: the
    positions attend causally; the masks of a rollout attend to the positions up to its anchor and to the masks before
    them. Rollouts do not see one another (P-EAGLE, arXiv 2602.01469; PARD, arXiv 2504.18583). `window_of`: the sliding
    window of a layer; 0: none.
    """

    def __init__(
        self, length: int, anchor: Int[torch.Tensor, "b a"], window_of: Callable[[int], int] = no_window
    ) -> None:
        self._length, self._anchor, self._window_of = length, anchor, window_of

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Attention of all positions, then of all masks, rollout after rollout."""
        s, scale, window = self._length, q.shape[-1] ** -0.5, self._window_of(layer)
        read_q, read_k, read_v = (part[:, :s] for part in (q, k, v))
        of_positions = read_q.transpose(1, 2), read_k.transpose(1, 2), read_v.transpose(1, 2)
        context = causal_attention(*of_positions, scale, (), window, extra)
        own_q, own_k, own_v = (part[:, s:] for part in (q, k, v))
        masks = attend_in_blocks(own_q, own_k, own_v, read_k, read_v, self._anchor + 1, True, window, extra)
        return torch.cat((context.transpose(1, 2).flatten(2), masks), 1)


def attend_in_blocks(
    q: Float[torch.Tensor, "b n h e"],
    k: Float[torch.Tensor, "b n g e"],
    v: Float[torch.Tensor, "b n g e"],
    context_k: Float[torch.Tensor, "b s g e"],
    context_v: Float[torch.Tensor, "b s g e"],
    seen: Int[torch.Tensor, "b a"],
    causal: bool = False,
    window: int = 0,
    extra: Float[torch.Tensor, " h"] | None = None,
    from_anchor: bool = False,
) -> Float[torch.Tensor, "b n he"]:
    """Attention of `n` slots, `n / a` in each block: to the first `seen` positions of the context, after which the
    slots stand, and to the slots of the own block, with `causal` to no later ones.

    `window`: of these, the tokens that a slot sees, counted back from itself, or with `from_anchor` those of the
    context that all slots see; 0: all. `extra`: a score per query head that joins the softmax.
    """
    (b, n, h, e), g, (_, a), s = q.shape, k.shape[2], seen.shape, context_k.shape[1]
    slots = n // a
    grouped = (q * e**-0.5).unflatten(2, (g, h // g)).permute(0, 2, 3, 1, 4)
    own_k, own_v = (part.transpose(1, 2).unflatten(2, (a, slots))[:, :, None] for part in (k, v))
    before = (grouped.flatten(2, 3) @ context_k.permute(0, 2, 3, 1)).view(b, g, h // g, a, slots, s)
    within = grouped.unflatten(3, (a, slots)) @ own_k.transpose(-1, -2)
    slot = torch.arange(slots, device=q.device)
    distance = slot[:, None] - slot
    outside = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window and not from_anchor:
        outside = outside | (distance >= window)
    within = within.masked_fill(outside, float("-inf"))
    end = seen[..., None] if from_anchor else seen[..., None] + slot + 1
    hidden = _hidden(seen, end - window if window else torch.zeros_like(end), s)
    score = torch.cat((before.masked_fill(hidden, float("-inf")), within), -1)
    if extra is not None:
        column = extra.to(score.dtype).view(g, h // g, 1, 1, 1).expand(*score.shape[:-1], 1)
        score = torch.cat((score, column), -1)
    weight = score.softmax(-1, dtype=v.dtype)
    out = (weight[..., :s].reshape(b, g, -1, s) @ context_v.transpose(1, 2)).view(b, g, h // g, a, slots, e)
    out = out + weight[..., s : s + slots] @ own_v
    merged: torch.Tensor = out.permute(0, 3, 4, 1, 2, 5).reshape(b, n, h * e)
    return merged


def _hidden(
    seen: Int[torch.Tensor, "b a"], first: Int[torch.Tensor, "b a k"], s: int
) -> Bool[torch.Tensor, "b 1 1 a k s"]:
    """Positions of the context beyond the first `seen`, or before the first one that a slot sees."""
    position = torch.arange(s, device=seen.device)
    return ((position >= seen[..., None, None]) | (position < first[..., None]))[:, None, None]
