"""The key-value cache of the CPU kernels."""

from collections.abc import Sequence
from ctypes import c_int32
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.block_table import blocks_for
from foretell.model.kernels import build, structures
from foretell.model.kernels.structures import LANES, PANEL_KINDS, Precision
from foretell.model.kv_cache import KVCache, rotate_blocks


def cache_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the keys and values that attention multiplies."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def cache_kind(precision: Precision) -> int:
    """The same as a constant of csrc/interface.h."""
    return PANEL_KINDS.index("F32" if precision == "float32" else "BF16")


class NativeKVCache(KVCache):
    """A cache whose numbers lie within a head as csrc/cache.h says; passes of the kernels alone read and write it."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, precision: Precision, int8: bool = False) -> None:
        super().__init__(layers, kv_heads, head_dim, cache_dtype(precision), torch.device("cpu"), int8)
        self._kind = cache_kind(precision)
        self._described: tuple[torch.Tensor, np.ndarray, structures.Cache] | None = None
        """The keys, the table and the structure that was made of them last."""

    @property
    def struct(self) -> structures.Cache:
        """The cache as an argument of the kernels; made again when the cache or its table has grown."""
        if self._described is None or self._described[0] is not self.k or self._described[1] is not self.blocks.table:
            scales = (None if part is None else part.data_ptr() for part in (self.k_scale, self.v_scale))
            blocks, table = self.k.shape[2], self.blocks.table
            addresses = self.k.data_ptr(), self.v.data_ptr(), *scales, table.ctypes.data
            self._described = self.k, table, structures.Cache(*addresses, blocks, *table.shape)
        return self._described[2]

    def _read(
        self, part: torch.Tensor, scales: torch.Tensor | None, layer: int, rows: Int[torch.Tensor, " b"], slots: int
    ) -> Float[torch.Tensor, "b h s d"]:
        """Keys or values, put in order by torch: for tests and selections, not for passes."""
        blocks = self.table[rows, : blocks_for(slots)].clamp(min=0).flatten()
        depth = 2 if self.dtype == torch.bfloat16 else 1
        found = part[layer].index_select(1, blocks)
        heads, _, size, dim = found.shape
        if part is self.k:  # [group of 16 slots][word of the head][slot][number of the word]
            found = found.view(heads, -1, size // LANES, dim // depth, LANES, depth).transpose(3, 4)
        else:  # [group of slots][dimension][slot]
            found = found.view(heads, -1, size // depth, dim, depth).transpose(3, 4)
        found = found.reshape(heads, len(rows), -1, dim)
        if scales is not None:
            factors = scales[layer].index_select(1, blocks).reshape(heads, len(rows), -1, 1)
            found = rotate_blocks(found * factors).to(self.dtype)
        return found.transpose(0, 1)[:, :, :slots]

    def copy_slots(
        self, source: KVCache, source_row: int, slots: Int[np.ndarray, "l h n"], row: int, target: int
    ) -> None:
        """Copy slots of a row of another cache of the same kind; see `KVCache.copy_slots`.

        Raises:
            ValueError: a slot lies outside the cache.
        """
        layers, heads, count = slots.shape
        assert isinstance(source, NativeKVCache) and source.k.dtype == self.k.dtype
        held = source.blocks.slots(source_row), self.blocks.slots(row)
        if slots.size and (slots.min() < 0 or slots.max() >= held[0] or target + count > held[1]):
            raise ValueError(f"slots {slots.min()} to {slots.max()} cannot be copied to {target} and the following")
        index = np.ascontiguousarray(slots, np.int32)
        build.library().foretell_cache_copy(
            *(self._kind, source.struct, source_row, index.ctypes.data, count),
            *(self.struct, row, target, layers, heads, self.k.shape[-1]),
        )

    def move(self, row: int, source: Sequence[int], target: int) -> None:
        """Copy the ascending slots `source` of a row to `target, target+1, …`, none of them to a later slot.

        Raises:
            ValueError: the slots are not in this order, or lie outside the cache.
        """
        if not all(a < b for a, b in pairwise([target - 1, *source, self.blocks.slots(row)])):
            raise ValueError(f"slots {list(source)} cannot be moved to {target} and the following")
        skip = next((i for i, s in enumerate(source) if s != target + i), len(source))
        if skip == len(source):
            return
        layers, heads, _, _, dim = self.k.shape
        slots = (c_int32 * (len(source) - skip))(*source[skip:])
        build.library().foretell_cache_move(
            *(self._kind, self.struct, layers, heads, dim, row, slots, len(slots), target + skip)
        )
