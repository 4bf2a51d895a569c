"""Launches of the kernels of a layer: their arguments, grids and compile-time settings."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float

from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.numbers import rotation_size
from foretell.model.cache.paged_layout import SPLIT, PagedLayout
from foretell.model.triton import attention, numbers, pages

PROGRAMS = 256
"""From so many tiles times heads on a program joins the parts of the context: some two for every multiprocessor."""
WRITTEN_TOKENS = 16
"""Tokens of a program that writes keys and values."""


WIDE_WARPS = 4 if torch.version.hip else 8
"""Warps of a program of attention over wide heads or rounded numbers: so few that it spills no registers."""
PADDED_REGISTERS = 208
"""Registers of a thread where a head is padded: without it CUDA's compiler spills some to fit one more block."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel. Products and sums are not fused but in matrix products, so that a part of the context has
    the same bits wherever it is joined.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, object]
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told beside the arguments; AMD's does not take a number of registers."""
        options: dict[str, int | bool] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return options if self.registers is None or torch.version.hip else {**options, "maxnreg": self.registers}

    def run(self) -> None:
        """Put the launch into the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


def _warps(store: KVCache) -> int:
    """Warps of a program of attention; the order of a sum depends on them, so both kernels have as many."""
    return 4 if store.k_scale is None and store.head_dim <= 128 else WIDE_WARPS


@dataclass(frozen=True)
class AttentionCall:
    """The attention of one layer: what `attend` and `combine` share."""

    heads: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    chunked: bool = False
    extra: Float[torch.Tensor, " h"] | None = None


def tokens_of_tile(group: int) -> int:
    """Tokens of a tile where so many query heads share a key-value head: some 32 queries."""
    return max(1, 32 // group)


def write_pages(
    q: Float[torch.Tensor, "t h e"] | None,
    k: Float[torch.Tensor, "t g e"] | None,
    v: Float[torch.Tensor, "t g e"] | None,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    factors: Float[torch.Tensor, " t"] | None,
    store: KVCache,
    layer: int,
    layout: PagedLayout,
) -> tuple[Launch, Float[torch.Tensor, "t h e"]]:
    """Rotate queries and keys by these angles (None: they are), multiply queries by their factors, and write keys and
    values of a layer of a store into its blocks; the queries as `attend` reads them. Either part may be missing.
    """
    heads, kv_heads, dim = 0 if q is None else q.shape[1], 0 if k is None else k.shape[1], store.head_dim
    out = torch.empty(layout.tokens, heads, dim, dtype=store.dtype, device=store.k.device)
    filler = layout.buffer
    cos, sin = angles if angles is not None else (filler, filler)
    parts = [part if part is None or part.stride()[1:] == (dim, 1) else part.contiguous() for part in (q, k, v)]
    arguments = {
        **{name: filler if part is None else part for name, part in zip("qkv", parts, strict=True)},
        **{f"{n}_stride": 0 if part is None else part.stride(0) for n, part in zip("qkv", parts, strict=True)},
        "cos": cos,
        "sin": sin,
        "factors": filler if factors is None else factors,
        "q_out": out,
        **_cache_arguments(store, layer, layout),
        "QUERIES": heads > 0,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": 0 if angles is None else cos.shape[-1],
        "FACTORS": factors is not None,
        "TOKENS": WRITTEN_TOKENS,
        **_head_settings(store),
    }
    grid = (-(-layout.tokens // WRITTEN_TOKENS), heads + 2 * kv_heads)
    return Launch(pages.write_pages, grid, arguments), out


def attend(
    q: Float[torch.Tensor, "t h e"], store: KVCache, layer: int, layout: PagedLayout, call: AttentionCall
) -> tuple[list[Launch], Float[torch.Tensor, "t h e"]]:
    """Attention of queries that `write_pages` gave over a layer of a store."""
    kv_heads, dim, device = store.k.shape[1], store.head_dim, q.device
    group, folds = call.heads // kv_heads, layout.splits == 1 or layout.tile_count * kv_heads >= PROGRAMS
    queries = max(16, 1 << (tokens_of_tile(group) * group - 1).bit_length())
    out = torch.empty(layout.tokens, call.heads, dim, dtype=q.dtype, device=device)
    size = (0,) if folds else (layout.tile_count, kv_heads, layout.splits, queries)
    shared = {
        "extra": q if call.extra is None else call.extra,
        "out": out,
        "parts": torch.empty(*size, dim, dtype=torch.float32, device=device),
        "part_sums": torch.empty(*size, 2, dtype=torch.float32, device=device),
        "fields": layout.fields,
        "tokens": layout.tokens,
        "tiles": layout.tiles,
        "splits": layout.splits,
        "window": call.window,
        "HEADS": call.heads,
        "GROUP": group,
        "BLOCK_M": queries,
        "SPLIT": SPLIT,
        "EXTRA": call.extra is not None,
        "WINDOW": call.window > 0,
        "CHUNKED": call.chunked,
    }
    cache, settings = _cache_arguments(store, layer, layout), _head_settings(store)
    arguments = {
        **shared,
        **cache,
        **settings,
        "q": q,
        "words": layout.words,
        "scale": call.scale,
        "softcap": call.softcap,
        "WORDS": layout.words_per_token,
        "SOFTCAP": call.softcap > 0,
        "FOLD": folds,
    }
    grid = (layout.tile_count, kv_heads, 1 if folds else layout.splits)
    registers = PADDED_REGISTERS if settings["BLOCK_D"] != dim else None
    launches = [Launch(attention.attend, grid, arguments, _warps(store), registers=registers)]
    if not folds:
        del settings["NUMBERS"]
        launches.append(Launch(attention.combine, grid[:2], {**shared, **settings}, _warps(store)))
    return launches, out


def _cache_arguments(store: KVCache, layer: int, layout: PagedLayout) -> dict[str, object]:
    """A layer of a store, its table and the layout."""
    scales = store.k if store.k_scale is None else store.k_scale, store.v if store.v_scale is None else store.v_scale
    return {
        "k_cache": store.k[layer],
        "v_cache": store.v[layer],
        "k_scale": scales[0][layer],
        "v_scale": scales[1][layer],
        "table": store.table,
        "width": store.table.shape[1],
        "head_blocks": store.k.shape[2],
        "fields": layout.fields,
        "tokens": layout.tokens,
    }


def _head_settings(store: KVCache) -> dict[str, object]:
    """Compile-time settings of a store."""
    kind = numbers.PLAIN if store.k_scale is None else numbers.FP8 if store.floats else numbers.INT8
    return {
        "D": store.head_dim,
        "BLOCK_D": max(16, 1 << (store.head_dim - 1).bit_length()),
        "NUMBERS": kind.value,
        "ROTATED": 0 if store.k_scale is None else rotation_size(store.head_dim).bit_length() - 1,
    }
