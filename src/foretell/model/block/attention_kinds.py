"""Which attention reads the cache of a model on a device: the one place that decides it."""

import os
from collections.abc import Sequence

import torch

from foretell.model.block.cached_attention import CachedAttention
from foretell.model.block.paged_attention import PagedAttention
from foretell.model.cache.base import Cache
from foretell.model.cache.kv_cache import KVCache, LatentCache
from foretell.model.cache.layout import Layout
from foretell.model.config.attention import AttentionSizes
from foretell.model.config.model import ModelConfig

KINDS: Sequence[type[CachedAttention]] = (PagedAttention, CachedAttention)
"""The kinds of attention, in the order in which a GPU has them; the last one reads every cache."""
VARIABLE = "FORETELL_ATTENTION"
"""Environment variable that asks for one of them by name."""


def new_store(
    config: ModelConfig, layers: int, sizes: AttentionSizes, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty store of keys and values of so many layers, which every kind of attention reads."""
    kind = KVCache if config.latent is None else LatentCache
    return kind(layers, sizes.kv_heads, sizes.head_dim, dtype, device, config.cache_dtype)


def attention_kind(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> type[CachedAttention]:
    """What attends to the cache of a model: what the environment asks for, else the first kind that can on a GPU, and
    torch elsewhere.

    Raises:
        ValueError: the environment asks for an attention that there is not, or that cannot.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if asked == "auto":
        return next(k for k in KINDS[0 if device.type == "cuda" else -1 :] if not k.unsupported(config, dtype, device))
    kind = next((kind for kind in KINDS if kind.name == asked), None)
    if kind is None:
        raise ValueError(f"{VARIABLE} is {asked}, which is none of: auto, {', '.join(kind.name for kind in KINDS)}")
    if reason := kind.unsupported(config, dtype, device):
        raise ValueError(f"{VARIABLE} asks for {asked} attention, which cannot serve this model: {reason}; use auto")
    return kind


def cached_attention(cache: Cache, layout: Layout, config: ModelConfig, device: torch.device) -> CachedAttention:
    """The attention of a pass over such stores; torch where the layout receives the queries."""
    stores = [store for store in cache.all_stores() if isinstance(store, KVCache)]
    kind = attention_kind(config, stores[0].dtype, device) if stores and layout.queries is None else CachedAttention
    return kind(cache, kind.place(layout, device, config, cache), config, layout)
