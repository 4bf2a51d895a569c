"""Attention over the blocks of a cache by the kernels of `model.triton`: one launch per layer, and where the parts of a
long context have programs of their own, one that joins them.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float

from foretell.model.block.attention import HeadScores, Keys, Merged, Queries, query_factors
from foretell.model.block.cached_attention import CachedAttention, StaticLayout
from foretell.model.block.rope import RopeAngles
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.cache.paged_layout import PagedLayout
from foretell.model.config.model import ModelConfig
from foretell.model.triton import run

WIDEST_HEAD = 128 if torch.version.hip else 256
"""Numbers of a head that fit the memory of a multiprocessor; AMD's has 64 KiB."""
_DTYPES = torch.float32, torch.bfloat16, torch.float16


class PagedAttention(CachedAttention):
    """Attention by Triton kernels, which also rotate queries and keys, and write keys and values."""

    name = "triton"
    rotates = True

    @classmethod
    def unsupported(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why it cannot attend to the cache of such a model; None: it can."""
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the device is no GPU"
        if device.type != "cuda" and dtype == torch.bfloat16:
            return "Triton's interpreter does not multiply bfloat16"
        if dtype not in _DTYPES:
            return f"it does not compute in {str(dtype).removeprefix('torch.')}"
        if config.latent is not None or any(config.sizes_of(i).head_dim > WIDEST_HEAD for i in config.attention_layers):
            return f"heads are wider than {WIDEST_HEAD} numbers, or latent"
        if config.cache_dtype not in ("auto", "int8", "fp8"):
            return f"it does not read a cache of {config.cache_dtype}"
        return "tokens select the pages that they read" if config.page_budget else None

    @classmethod
    def place(cls, layout: Layout, device: torch.device, config: ModelConfig, cache: Cache) -> PagedLayout:
        """A layout on the device."""
        return PagedLayout.from_layout(layout, device, _tile(config))

    @classmethod
    def place_static(cls, layout: Layout, device: torch.device, config: ModelConfig, cache: Cache) -> StaticLayout:
        """A layout on the device, with its sizes rounded up to powers of two."""
        placed = PagedLayout.from_layout(layout, device, _tile(config), fixed=True)
        tokens = torch.arange(placed.tokens).clamp(max=layout.token_count - 1)
        return StaticLayout(placed, tokens, torch.arange(layout.token_count), placed.shape)

    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Write the new keys and values to the cache, then attend to the slots that the layout makes visible."""
        return self.rotate_and_attend(layer, q, k, v, None, extra)

    def attend_shared(self, layer: int, q: Queries, extra: HeadScores = None) -> Merged:
        """Attend to the slots that the layout makes visible."""
        return self.rotate_and_attend(layer, q, None, None, None, extra)

    def write(self, layer: int, k: Float[torch.Tensor, "t g e"], v: Float[torch.Tensor, "t g e"]) -> None:
        """Write the new keys and values of a layer to the cache."""
        self._write(layer, None, k, v, None)

    def rotate_and_attend(
        self,
        layer: int,
        q: Queries,
        k: Keys | None,
        v: Keys | None,
        angles: RopeAngles | None,
        extra: HeadScores = None,
    ) -> Merged:
        """The same with the rotation of queries and keys."""
        from foretell.model.triton import launch

        c, (store, index) = self._config, self._store(layer)
        queries = self._write(layer, q, k, v, angles)
        window = c.window_of(layer)
        call = launch.AttentionCall(q.shape[1], c.scale, c.attention_softcap, window, c.chunked and window > 0, extra)
        launches, out = launch.attend(queries, store, index, self._placed, call)
        for each in launches:
            each.run()
        return out.flatten(1)

    def _write(self, layer: int, q: Any, k: Any, v: Any, angles: RopeAngles | None) -> Float[torch.Tensor, "t h e"]:
        from foretell.model.triton import launch

        (store, index), scaling = self._store(layer), self._config.query_scaling_of(layer)
        factors = None if scaling is None or q is None else query_factors(scaling, self.position)
        return run(launch.write_pages(q, k, v, angles, factors, store, index, self._placed))


def _tile(config: ModelConfig) -> int:
    """Tokens of a tile, for the layers with the most query heads per key-value head."""
    from foretell.model.triton.launch import tokens_of_tile

    return min(tokens_of_tile(s.heads // s.kv_heads) for s in map(config.sizes_of, range(config.layers)))
