"""Attention over the blocks of a cache by torch's `flex_attention`: the whole cache is one sequence of keys, and a mask
per window says which of them a token sees.
"""

import functools
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int

from foretell.model.block.attention import scale_queries
from foretell.model.block.cached_attention import CachedAttention
from foretell.model.cache.base import Cache
from foretell.model.cache.block_table import BLOCK_SLOTS
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.cache.paged_layout import WORD_BITS, PagedLayout
from foretell.model.config.model import ModelConfig


class FlexAttention(CachedAttention):
    """Attention by `torch.nn.attention.flex_attention`, compiled on GPUs (Dong et al., arXiv 2412.05496)."""

    name = "flex"
    captured = False

    def __init__(self, cache: Cache, placed: Any, config: ModelConfig, layout: Layout | None = None) -> None:
        super().__init__(cache, placed, config, layout)
        self._masks: dict[tuple[KVCache, int], Any] = {}

    @classmethod
    def unsupported(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why it cannot attend to the cache of such a model; None: it can."""
        if device.type != "cpu" and find_spec("triton") is None:
            return "the package triton, by which torch compiles it, is not installed"
        if config.latent is not None:
            return "heads are latent"
        if config.cache_dtype != "auto":
            return f"it does not read a cache of {config.cache_dtype}"
        return "tokens select the pages that they read" if config.page_budget else None

    @classmethod
    def place(cls, layout: Layout, device: torch.device, config: ModelConfig, cache: Cache) -> PagedLayout:
        """A layout on the device."""
        return PagedLayout.from_layout(layout, device, layout.token_count)

    def attend_shared(
        self, layer: int, q: Float[torch.Tensor, "t h e"], extra: Float[torch.Tensor, " h"] | None = None
    ) -> Float[torch.Tensor, "t he"]:
        """Attend to the slots that the layout makes visible."""
        from torch.nn.attention.flex_attention import AuxRequest

        c, (store, index) = self._config, self._store(layer)
        q = scale_queries(q, self.position, c.query_scaling_of(layer)).to(store.dtype)
        window = c.window_of(layer)
        if (store, window) not in self._masks:
            self._masks[store, window] = _block_mask(self._placed, store, window, c.chunked)
        k, v = (part[index].flatten(1, 2)[None] for part in (store.k, store.v))
        cap = c.attention_softcap

        def bounded(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
            return torch.tanh(score / cap) * cap

        out, beside = _flex(q.device.type)(
            q.transpose(0, 1)[None], k, v, score_mod=bounded if cap else None, block_mask=self._masks[store, window],
            scale=c.scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        if extra is not None:  # of the whole softmax, a sink leaves this share to the keys
            out = (out * torch.sigmoid(beside.lse - extra[:, None].float())[..., None]).to(out.dtype)
        merged: torch.Tensor = out[0].transpose(0, 1).flatten(1)
        return merged


@functools.cache
def _flex(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def _block_mask(placed: PagedLayout, store: KVCache, window: int, chunked: bool) -> Any:
    """Which numbers of the cache, in the order of its blocks, every token sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = store.table.shape
    blocks = store.k.shape[2]
    places = torch.arange(width, device=store.table.device).expand(rows, -1)
    target = torch.where(store.table < 0, blocks, store.table).long()
    index = torch.full((rows, blocks + 1), -1, device=store.table.device).scatter(1, target, places)
    row, _, position, prefix, last, _, _ = placed.fields.long()
    words = torch.nn.functional.pad(placed.words.long(), (0, 1))
    least = last - (position % window + 1 if chunked and window else window)

    def seen(batch: Any, head: Any, token: Any, place: Any) -> torch.Tensor:
        block = index[row[token], place // BLOCK_SLOTS]
        slot = block * BLOCK_SLOTS + place % BLOCK_SLOTS
        behind = slot - prefix[token]
        word = words[token, (behind // WORD_BITS).clamp(0, words.shape[1] - 1)]
        bit = behind % WORD_BITS
        visible = (behind < 0) | (((word >> bit) & 1) > 0)
        if window:
            rank = (word >> WORD_BITS) + _set_bits(word & ((1 << bit) - 1))
            visible = visible & (torch.where(behind < 0, slot, prefix[token] + rank) > least[token])
        both: torch.Tensor = (block >= 0) & visible
        return both

    return create_block_mask(seen, 1, None, placed.tokens, blocks * BLOCK_SLOTS, device=store.k.device)


def _set_bits(x: Int[torch.Tensor, "*n"]) -> Int[torch.Tensor, "*n"]:
    """Number of set bits of 16-bit words."""
    x = x - ((x >> 1) & 0x5555)
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F
