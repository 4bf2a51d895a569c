"""Attention of new tokens over a cache, in plain torch: the reference for every kernel and the path for devices without one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.model.cache import Cache, Layout


@dataclass(frozen=True)
class Plan:
    """A layout padded to a rectangle: `b` rows of `n` queries over `s` slots, made once per pass and used by every layer."""

    rows: Int[torch.Tensor, " b"]
    index: Int[torch.Tensor, "b n"]
    """Flat token of every padded place (repeats the last one as padding)."""
    back: tuple[Int[torch.Tensor, " t"], Int[torch.Tensor, " t"]]
    mask: Bool[torch.Tensor, "b n s"]
    key_position: Int[torch.Tensor, "b n s"] | None
    """Position of every slot as each query sees it; None where no layer has a window."""
    position: Int[torch.Tensor, "b n"]

    @staticmethod
    def of(layout: Layout, device: torch.device, windows: bool) -> "Plan":
        """Pad `layout`; `windows` says whether some layer needs key positions."""
        rows, back_row, count = torch.unique_consecutive(layout.row.long(), return_inverse=True, return_counts=True)
        first = count.cumsum(0) - count
        back_column = torch.arange(layout.tokens) - first[back_row]
        index = first[:, None] + torch.minimum(torch.arange(int(count.max())), count[:, None] - 1)
        slots = int(max(layout.prefix.max(), layout.slot.max() + 1))
        mask = torch.arange(slots) < layout.prefix[:, None]
        position = torch.arange(slots).expand(layout.tokens, slots).clone() if windows else None
        for j in range(layout.extra.shape[1]):
            token = torch.nonzero(layout.extra[:, j] >= 0)[:, 0]
            slot = layout.extra[token, j].long()
            mask[token, slot] = True
            if position is not None:
                position[token, slot] = layout.prefix[token].long() + j
        return Plan(
            rows=rows.to(device),
            index=index.to(device),
            back=(back_row.to(device), back_column.to(device)),
            mask=mask[index].to(device),
            key_position=None if position is None else position[index].to(device),
            position=layout.position.long()[index].to(device),
        )

    def visible(self, window: int) -> Bool[torch.Tensor, "b n s"]:
        """Slots that each query may see in a layer with this window (0: no window)."""
        if not window or self.key_position is None:
            return self.mask
        return self.mask & (self.key_position > (self.position - window)[..., None])


def attend(
    q: Float[torch.Tensor, "t h d"], layer: int, cache: Cache, plan: Plan, window: int, scale: float, softcap: float
) -> Float[torch.Tensor, "t hd"]:
    """Softmax attention with grouped key-value heads; query heads of a group are folded into the query axis so that keys are read once."""
    heads, dim = q.shape[1:]
    b, n, s = plan.mask.shape
    k, v = (part[layer].index_select(0, plan.rows)[:, :, :s].to(q.dtype) for part in (cache.k, cache.v))
    groups = heads // k.shape[1]
    folded = q[plan.index].view(b, n, k.shape[1], groups, dim).permute(0, 2, 3, 1, 4).reshape(b, k.shape[1], groups * n, dim)
    mask = plan.visible(window)[:, None, None].expand(b, 1, groups, n, s).reshape(b, 1, groups * n, s)
    if softcap:
        score = torch.tanh(folded @ k.transpose(-1, -2) * (scale / softcap)) * softcap
        out = score.masked_fill(~mask, float("-inf")).float().softmax(-1).to(v.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(b, -1, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(b, n, heads * dim)
    return out[plan.back]
