"""Attention of DFlash's blocks during training."""

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.attention import AttentionBackend


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
        sinks: Float[torch.Tensor, " h"] | None = None,
    ) -> Float[torch.Tensor, "b n he"]:
        """Attention of all slots, block after block."""
        (b, n, h, e), g, (_, a), s = q.shape, k.shape[2], self._anchor.shape, self._k.shape[1]
        slots = n // a
        grouped = (q * e**-0.5).unflatten(2, (g, h // g)).permute(0, 2, 3, 1, 4)
        own_k, own_v = (part.transpose(1, 2).unflatten(2, (a, slots))[:, :, None] for part in (k, v))
        before = (grouped.flatten(2, 3) @ self._k.permute(0, 2, 3, 1)).view(b, g, h // g, a, slots, s)
        within = grouped.unflatten(3, (a, slots)) @ own_k.transpose(-1, -2)
        score = torch.cat((before.masked_fill(self._hidden(s), float("-inf")), within), -1)
        weight = score.softmax(-1, dtype=v.dtype)
        out = (weight[..., :s].reshape(b, g, -1, s) @ self._v.transpose(1, 2)).view(b, g, h // g, a, slots, e)
        out = out + weight[..., s:] @ own_v
        merged: torch.Tensor = out.permute(0, 3, 4, 1, 2, 5).reshape(b, n, h * e)
        return merged

    def _hidden(self, s: int) -> Bool[torch.Tensor, "b 1 1 a 1 s"]:
        position = torch.arange(s, device=self._anchor.device)
        return (position >= self._anchor[..., None])[:, None, None, :, None]
