"""Attention of new tokens over a cache, in plain torch: the reference for every kernel and the path for devices without
one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.model.cache import KVCache, Layout
from foretell.model.config import ModelConfig
from foretell.model.linear import widen


class Sight(ABC):
    """What the queries of one call may attend to: keys and values of their past, and those of the call itself."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "*t h e"],
        k: Float[torch.Tensor, "*t g e"],
        v: Float[torch.Tensor, "*t g e"],
    ) -> Float[torch.Tensor, "*t he"]:
        """Softmax attention in a layer; remembers the new keys and values for later calls."""


@dataclass(frozen=True)
class PaddedLayout:
    """A layout padded to a rectangle on the device, `b` rows of `n` queries over `s` slots: made once per pass, used by
    every layer.

    Padding repeats a real token, so that whatever it writes is written already.
    """

    rows: Int[torch.Tensor, " b"]
    """Cache row of every rectangle row."""
    index: Int[torch.Tensor, "b n"]
    """Flat token of every place."""
    back: Int[torch.Tensor, " t"]
    """Place (row-major) of every flat token."""
    row: Int[torch.Tensor, " t"]
    slot: Int[torch.Tensor, " t"]
    position: Int[torch.Tensor, " t"]
    mask: Bool[torch.Tensor, "b n s"]
    age: Int[torch.Tensor, "b n s"]
    """How many positions before the query each slot's token stands, as the query sees it (for sliding windows)."""

    @staticmethod
    def of(
        layout: Layout, device: torch.device, grid: Int[torch.Tensor, "b n"] | None = None, slots: int = 0
    ) -> "PaddedLayout":
        """Plan a pass; `grid` gives the rectangle where its shape must be a given one, `slots` the least width of the
        masks.
        """
        grid = rectangle(layout) if grid is None else grid
        slots = max(slots, int(layout.prefix.max()), int(layout.slot.max()) + 1)
        mask = torch.arange(slots) < layout.prefix[:, None]
        key = torch.arange(slots).repeat(layout.tokens, 1)
        for j in range(layout.extra.shape[1]):
            token = torch.nonzero(layout.extra[:, j] >= 0)[:, 0]
            slot = layout.extra[token, j].long()
            mask[token, slot] = True
            key[token, slot] = layout.prefix[token].long() + j
        age = layout.position.long()[:, None] - key
        parts = (
            layout.row.long()[grid[:, 0]],
            grid,
            first_places(grid, layout.tokens),
            layout.row.long(),
            layout.slot.long(),
            layout.position.long(),
            mask[grid],
            age[grid],
        )
        return PaddedLayout(*(p.to(device) for p in parts))

    def visible(self, window: int) -> Bool[torch.Tensor, "b n s"]:
        """Slots that each query may see in a layer with this window (0: no window)."""
        return self.mask & (self.age < window) if window else self.mask

    def copy_(self, other: "PaddedLayout") -> None:
        """Take over the numbers of a plan of the same shape."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))


def rectangle(layout: Layout, b: int = 0, n: int = 0) -> Int[torch.Tensor, "b n"]:
    """Flat tokens by row, padded to at least `b` rows of `n`: short rows repeat their last token, missing rows the last
    row.
    """
    count = torch.unique_consecutive(layout.row, return_counts=True)[1]
    first = count.cumsum(0) - count
    place = torch.minimum(torch.arange(max(n, int(count.max()))), count[:, None] - 1)
    grid = first[:, None] + place
    return torch.cat([grid, grid[-1:].expand(max(b - len(grid), 0), -1)])


def first_places(grid: Int[torch.Tensor, "b n"], tokens: int) -> Int[torch.Tensor, " t"]:
    """Where in a rectangle (row-major) each flat token stands first."""
    back = torch.empty(tokens, dtype=torch.int64)
    # Backwards, so that of several places the first is written last.
    back[grid.flatten().flip(0)] = torch.arange(grid.numel()).flip(0)
    return back


def attend(
    q: Float[torch.Tensor, "t h d"],
    layer: int,
    cache: KVCache,
    plan: PaddedLayout,
    window: int,
    scale: float,
    softcap: float,
) -> Float[torch.Tensor, "t hd"]:
    """Softmax attention with grouped key-value heads; query heads of a group are folded into the query axis so that
    keys are read once.
    """
    heads, dim = q.shape[1:]
    b, n, s = plan.mask.shape
    k, v = (part[layer].index_select(0, plan.rows)[:, :, :s] for part in (cache.k, cache.v))
    kv = k.shape[1]
    groups = heads // kv
    folded = q[plan.index].view(b, n, kv, groups, dim).permute(0, 2, 3, 1, 4).reshape(b, kv, groups * n, dim)
    mask = plan.visible(window)[:, None, None].expand(b, 1, groups, n, s).reshape(b, 1, groups * n, s)
    if softcap:
        score = torch.tanh(folded @ k.transpose(-1, -2) * (scale / softcap)) * softcap
        out = widen(score.masked_fill(~mask, float("-inf"))).softmax(-1).to(v.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(b, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, heads * dim)
    return out[plan.back]


class Cached(Sight):
    """Keys and values go to a cache, where a plan says; queries see there what it lets them.

    All three are rounded to the cache's dtype.
    """

    def __init__(self, cache: KVCache, plan: PaddedLayout, config: ModelConfig) -> None:
        self._cache, self._plan, self._config = cache, plan, config

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "t h e"],
        k: Float[torch.Tensor, "t g e"],
        v: Float[torch.Tensor, "t g e"],
    ) -> Float[torch.Tensor, "t he"]:
        """Attention over the cache."""
        c, cache, plan = self._config, self._cache, self._plan
        cache.write(layer, plan.row, plan.slot, k, v)
        q = q.to(cache.k.dtype)
        return attend(q, layer, cache, plan, c.window_of(layer), c.scale, c.attention_softcap)
