"""Attention of new tokens over a key-value cache in plain torch: the reference of the CPU kernels, and the attention of
other devices.
"""

from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.block.attention import (
    AttentionBackend,
    HeadScores,
    Keys,
    Merged,
    Queries,
    masked_attention,
    scale_queries,
)
from foretell.model.cache.base import Cache
from foretell.model.cache.block_table import BLOCK_SLOTS
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout, PaddedLayout, find_padded_index, next_power, pad_to_rectangle
from foretell.model.cache.numbers import rotate_blocks
from foretell.model.cache.packed_groups import GROUP_SLOTS, RESIDUAL, PackedGroups
from foretell.model.cache.pages import selected_mask
from foretell.model.cache.state_store import LayerStates, PassStates, StateStore
from foretell.model.config.model import ModelConfig

_SLOT_STEP = 256
"""Static widths of masks are multiples of this."""


class PlacedLayout(Protocol):
    """The layout of a pass on a device, as a kind of attention reads it."""

    @property
    def position(self) -> Int[torch.Tensor, " t"]:
        """Positions of the new tokens."""

    @property
    def token(self) -> Int[torch.Tensor, " t"]:
        """Ids of the new tokens; 0 where they are not known."""

    def copy_(self, other: Any) -> None:
        """Take the numbers of another layout of the same shapes."""


class StaticLayout(NamedTuple):
    """A layout whose shapes are rounded up, so that few of them serve all passes."""

    placed: Any
    tokens: Int[torch.Tensor, " p"]
    """Of every token of the padded pass, its index in the layout; on the host."""
    padded: Int[torch.Tensor, " t"]
    """Of every token of the layout, its index in the padded pass; on the host."""
    shape: tuple[int, ...]
    """What all shapes of a pass follow from."""


class CachedAttention(AttentionBackend):
    """Attention over a key-value cache, in the cache's dtype, in plain torch. Other kinds of attention are subclasses,
    which read the same cache.
    """

    name = "torch"

    def __init__(self, cache: Cache, placed: Any, config: ModelConfig, layout: Layout | None = None) -> None:
        self._cache, self._placed, self._config, self._layout = cache, placed, config, layout
        self._states: dict[Cache, PassStates] = {}

    @classmethod
    def unsupported(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why it cannot attend to the cache of such a model; None: it can."""
        return None

    @classmethod
    def place(cls, layout: Layout, device: torch.device, config: ModelConfig, cache: Cache) -> PlacedLayout:
        """A layout on the device."""
        return PaddedLayout.from_layout(layout, device)

    @classmethod
    def place_static(cls, layout: Layout, device: torch.device, config: ModelConfig, cache: Cache) -> StaticLayout:
        """A layout on the device, with rows and tokens rounded up to powers of two, and slots to multiples of 256."""
        b, n = pad_to_rectangle(layout).shape
        index = pad_to_rectangle(layout, next_power(b), next_power(n))
        used = int(max(layout.visible_prefix.max(), layout.slot.max() + 1))
        widths = [store.table.shape[1] for store in cache.all_stores() if isinstance(store, KVCache)]
        slots = min(-(-used // _SLOT_STEP) * _SLOT_STEP, min(widths) * BLOCK_SLOTS)
        flat = layout.select(index.flatten())
        placed = PaddedLayout.from_layout(flat, device, torch.arange(index.numel()).view(index.shape), slots)
        padded = find_padded_index(index, layout.token_count)
        return StaticLayout(placed, index.flatten(), padded, (*index.shape, placed.mask.shape[2]))

    @property
    def position(self) -> Int[torch.Tensor, " t"]:
        """Positions of the new tokens, on the device."""
        position: torch.Tensor = self._placed.position
        return position

    @property
    def token(self) -> Int[torch.Tensor, " t"]:
        """Ids of the new tokens, on the device; 0 where they are not known."""
        token: torch.Tensor = self._placed.token
        return token

    def states(self, layer: int) -> LayerStates:
        """The recurrent states of a layer."""
        store, index = self._cache.store(layer)
        assert isinstance(store, StateStore) and self._layout is not None
        if store not in self._states:
            self._states[store] = store.pass_states(self._layout)
        return LayerStates(self._states[store], index)

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Write the new keys and values to the cache, then attend to the slots that the layout makes visible."""
        self.write(layer, k, v)
        return self.attend_shared(layer, q, extra)

    def write(self, layer: int, k: Float[torch.Tensor, "t g e"], v: Float[torch.Tensor, "t g e"]) -> None:
        """Write the new keys and values of a layer to the cache."""
        store, index = self._store(layer)
        store.write(index, self._placed.row, self._placed.slot, k, v)

    def attend_shared(self, layer: int, q: Queries, extra: HeadScores = None) -> Merged:
        """Attend to the slots that the layout makes visible."""
        c, padded, (store, index) = self._config, self._placed, self._store(layer)
        q = scale_queries(q, padded.position, c.query_scaling_of(layer)).to(store.dtype)
        if self._layout is not None and self._layout.queries is not None:
            self._layout.queries[layer] = q
        mask = padded.window_mask(c.window_of(layer), c.chunked)
        return padded_attention(q, index, store, padded, mask, c.scale, c.attention_softcap, extra, c.page_budget)

    def _store(self, layer: int) -> tuple[KVCache, int]:
        store, index = self._cache.store(layer)
        assert isinstance(store, KVCache)
        return store, index


def padded_attention(
    q: Float[torch.Tensor, "t h d"],
    layer: int,
    cache: KVCache,
    padded: PaddedLayout,
    mask: Bool[torch.Tensor, "b n s"],
    scale: float,
    softcap: float,
    extra: Float[torch.Tensor, " h"] | None = None,
    page_budget: int = 0,
) -> Float[torch.Tensor, "t hd"]:
    """Grouped-query softmax attention over the slots that the mask allows; the heads of a group become further queries,
    so that keys are read once. `page_budget`: see `ModelConfig`.
    """
    heads, dim = q.shape[1:]
    b, n, s = padded.mask.shape
    k, v = cache.read(layer, padded.cache_rows, s)
    if cache.packed is not None:
        k, v, mask = _beside_packed(k, v, mask, layer, cache, cache.packed, padded)
        s = k.shape[2]
    kv = k.shape[1]
    group = heads // kv
    folded = q[padded.token_index].view(b, n, kv, group, dim).permute(0, 2, 3, 1, 4).reshape(b, kv, group * n, dim)
    seen = mask[:, None]
    if page_budget:
        seen = seen & _selected(folded.unflatten(2, (group, n)), k, cache, padded, page_budget)
    mask = seen[:, :, None].expand(b, -1, group, n, s).reshape(b, -1, group * n, s)
    if extra is not None:
        extra = extra.view(kv, group, 1).expand(kv, group, n).reshape(kv, group * n)
    out = masked_attention(folded, k, v, mask, scale, softcap, extra)
    out = out.view(b, kv, group, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, heads * dim)
    return out[padded.padded_index]


def _selected(
    q: Float[torch.Tensor, "b h q n d"],
    k: Float[torch.Tensor, "b h s d"],
    cache: KVCache,
    padded: PaddedLayout,
    budget: int,
) -> Bool[torch.Tensor, "b h n s"]:
    """`selected_mask` in the basis in which keys are stored."""
    if cache.k_scale is not None:
        q, k = rotate_blocks(q.float()), rotate_blocks(k.float())
    return selected_mask(q, k, padded, budget)


def _beside_packed(
    k: Float[torch.Tensor, "b h s d"],
    v: Float[torch.Tensor, "b h s d"],
    mask: Bool[torch.Tensor, "b n s"],
    layer: int,
    cache: KVCache,
    packed: PackedGroups,
    padded: PaddedLayout,
) -> tuple[Float[torch.Tensor, "b h m d"], Float[torch.Tensor, "b h m d"], Bool[torch.Tensor, "b n m"]]:
    """Packed keys and values before the whole ones, and which of both every query sees: see `packed_slots`."""
    position = padded.position[padded.token_index]
    limit = (position - RESIDUAL).clamp(min=0) // GROUP_SLOTS * GROUP_SLOTS
    most = min(int(limit.max()), mask.shape[2])
    if not most:
        return k, v, mask
    narrow = torch.arange(mask.shape[2], device=mask.device) < limit[..., None]
    older = packed.read(layer, padded.cache_rows.tolist(), most, cache.dtype)
    return (
        torch.cat((older[0], k), 2),
        torch.cat((older[1], v), 2),
        torch.cat(((mask & narrow)[..., :most], mask & ~narrow), 2),
    )
