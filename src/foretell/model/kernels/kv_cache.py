"""The key-value cache of the CPU kernels."""

from collections.abc import Sequence
from ctypes import c_int32
from itertools import pairwise

import torch

from foretell.model.kernels import build, structures
from foretell.model.kernels.structures import PANEL_KINDS, Precision
from foretell.model.kv_cache import KVCache


def cache_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the keys and values that attention multiplies."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def cache_kind(precision: Precision) -> int:
    """The same as a constant of csrc/interface.h."""
    return PANEL_KINDS.index("F32" if precision == "float32" else "BF16")


class NativeKVCache(KVCache):
    """A cache whose numbers lie within a head as csrc/cache.h says; only the kernels read and write it."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, precision: Precision, int8: bool = False) -> None:
        super().__init__(layers, kv_heads, head_dim, cache_dtype(precision), torch.device("cpu"), int8)
        self._kind = cache_kind(precision)

    @property
    def struct(self) -> structures.Cache:
        """The cache as an argument of the kernels."""
        scales = (None if part is None else part.data_ptr() for part in (self.k_scale, self.v_scale))
        blocks, table = self.k.shape[2], self.blocks.table
        return structures.Cache(self.k.data_ptr(), self.v.data_ptr(), *scales, table.ctypes.data, blocks, *table.shape)

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
