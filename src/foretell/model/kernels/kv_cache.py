"""The key-value cache of the CPU kernels."""

from collections.abc import Sequence
from ctypes import c_int32
from itertools import pairwise
from operator import is_

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.cache.block_table import BLOCK_SLOTS, blocks_for
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.numbers import join_halves, rotate_blocks, widen
from foretell.model.cache.packed_groups import RESIDUAL
from foretell.model.cache.pages import PAGE, optional_slots
from foretell.model.config.model import CacheDtype
from foretell.model.kernels import build, structures
from foretell.model.kernels.structures import LANES, PANEL_KINDS, Precision


def cache_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the keys and values that attention multiplies."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def cache_kind(precision: Precision) -> int:
    """The same as a constant of csrc/interface.h."""
    return PANEL_KINDS.index("F32" if precision == "float32" else "BF16")


class NativeKVCache(KVCache):
    """A cache whose numbers lie within a head as csrc/cache.h says; passes of the kernels alone read and write it."""

    _coarse = False
    """Whether passes read the upper halves of numbers only."""

    splits = True
    k_least: torch.Tensor | None = None
    """Least numbers of the keys of every page, `[layers, kv_heads, blocks, pages, head_dim]`, as csrc/pages.h lays them
    out; None: passes select no pages.
    """
    k_most: torch.Tensor | None = None
    """Greatest numbers, likewise."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        precision: Precision,
        numbers: CacheDtype = "auto",
        page_budget: int = 0,
    ) -> None:
        super().__init__(layers, kv_heads, head_dim, cache_dtype(precision), torch.device("cpu"), numbers)
        self._kernels, self._kind, self._page_budget = build.library(), cache_kind(precision), page_budget
        self._struct: tuple[tuple[object, ...], structures.Cache] | None = None
        """`struct`, and the memory that it describes."""
        self._page_slots: Int[np.ndarray, " r"] = np.zeros(0, np.int32)
        """Slots of every row, from the first one on, of whose pages the bounds are known in all layers."""
        if page_budget:
            self.k_least = torch.zeros(layers, kv_heads, 0, BLOCK_SLOTS // PAGE, head_dim, dtype=self.dtype)
            self.k_most = torch.zeros_like(self.k_least)

    @property
    def _names(self) -> tuple[str, ...]:
        return *super()._names, "k_least", "k_most"

    def reserve(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Give each of these rows room for so many tokens; see `Cache.reserve`."""
        super().reserve(rows, slots)
        if self._page_budget and len(self._page_slots) < self.rows:
            self._page_slots = np.pad(self._page_slots, (0, self.rows - len(self._page_slots)))

    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep these nodes of the row's last tree; see `KVCache.keep`."""
        super().keep(row, length, path)
        if self._page_budget and path:
            self._page_slots[row] = min(optional_slots(length + len(path) - 1), length // PAGE * PAGE)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; see `KVCache.truncate`."""
        super().truncate(row, length)
        if row < len(self._page_slots):
            self._page_slots[row] = min(int(self._page_slots[row]), length // PAGE * PAGE)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of a row those of another; see `KVCache.copy_row`."""
        super().copy_row(source, target, length)
        if self._page_budget:
            self._page_slots[target] = min(int(self._page_slots[source]), length // PAGE * PAGE)

    @property
    def struct(self) -> structures.Cache:
        """The cache as an argument of the kernels; one object as long as its memory stays where it is."""
        memory = type(self), self.k, self.blocks.table, self._page_slots
        if self._struct is not None and self.packed is None and all(map(is_, memory, self._struct[0])):
            return self._struct[1]
        self._struct = memory, self._describe()
        return self._struct[1]

    def _describe(self) -> structures.Cache:
        parts, table = ("k", "v", "k_low", "v_low", "k_scale", "v_scale"), self.blocks.table
        struct = structures.Cache(
            table=table.ctypes.data,
            blocks=self.k.shape[2],
            rows=table.shape[0],
            row_blocks=table.shape[1],
            bits=self.bits,
            coarse=self._coarse,
        )
        for name in parts:
            part = getattr(self, name)
            if part is not None:
                setattr(struct, name, part.data_ptr())
        if (p := self.packed) is not None:
            struct.k_packed, struct.v_packed, struct.k_range, struct.v_range = (
                part.data_ptr() for part in (p.k, p.v, p.k_range, p.v_range)
            )
            struct.packed_table, struct.packed_slots = p.blocks.table.ctypes.data, p.done.ctypes.data
            struct.packed_blocks, struct.packed_row_blocks = p.k.shape[2], p.blocks.table.shape[1]
            struct.packed_bits, struct.packed_residual = p.bits, RESIDUAL
        if self.k_least is not None and self.k_most is not None:
            struct.k_least, struct.k_most = self.k_least.data_ptr(), self.k_most.data_ptr()
            struct.page_slots, struct.page_budget = self._page_slots.ctypes.data, self._page_budget
        return struct

    @property
    def upper_halves(self) -> "NativeKVCache":
        """The same cache, of whose numbers passes read the upper halves only; they write both.

        Raises:
            ValueError: its numbers do not lie in halves.
        """
        if self.k_low is None:
            raise ValueError("only a cache whose int8 numbers lie in halves has upper ones: use int8-halves")
        view = object.__new__(_UpperHalves)
        view.__dict__ = self.__dict__  # so that both are the same cache as it grows
        return view

    def _read(
        self, part: torch.Tensor, scales: torch.Tensor | None, layer: int, rows: Int[torch.Tensor, " b"], slots: int
    ) -> Float[torch.Tensor, "b h s d"]:
        """Keys or values, put in order by torch: for tests and selections, not for passes."""
        blocks = self.table[rows, : blocks_for(slots)].clamp(min=0).flatten()
        numbers = self._in_order(part, layer, rows, blocks)
        if scales is not None:
            low = self.k_low if part is self.k else self.v_low
            if low is None:
                numbers = widen(numbers, self.bits)
            else:
                numbers = join_halves(numbers, self._in_order(low, layer, rows, blocks))
            factors = scales[layer].index_select(1, blocks).reshape(*numbers.shape[:3], 1)
            numbers = rotate_blocks(numbers * factors).to(self.dtype)
        return numbers.transpose(0, 1)[:, :, :slots]

    def _in_order(
        self, part: torch.Tensor, layer: int, rows: Int[torch.Tensor, " b"], blocks: Int[torch.Tensor, " n"]
    ) -> Float[torch.Tensor, "h b s n"]:
        """Stored numbers of some blocks, by slot."""
        depth = 2 if self.dtype == torch.bfloat16 else 1
        numbers = part[layer].index_select(1, blocks)
        heads, _, size, dim = numbers.shape
        if part is self.k or part is self.k_low:  # [group of 16 slots][word of the head][slot][number of the word]
            numbers = numbers.view(heads, -1, size // LANES, dim // depth, LANES, depth).transpose(3, 4)
        else:  # [group of slots][dimension][slot]
            numbers = numbers.view(heads, -1, size // depth, dim, depth).transpose(3, 4)
        return numbers.reshape(heads, len(rows), -1, dim)

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
        self._kernels.foretell_cache_copy(
            self._kind,
            source.struct,
            source_row,
            index.ctypes.data,
            count,
            self.struct,
            row,
            target,
            layers,
            heads,
            self.head_dim,
        )

    def move(self, row: int, source: Sequence[int], target: int) -> None:
        """Copy the ascending slots `source` of a row to `target, target+1, …`, none of them to a later slot.

        Raises:
            ValueError: the slots are not in this order, or lie outside the cache.
        """
        skip = next((i for i, s in enumerate(source) if s != target + i), len(source))
        if skip == len(source):
            return
        if not all(a < b for a, b in pairwise([target - 1, *source, self.blocks.slots(row)])):
            raise ValueError(f"slots {list(source)} cannot be moved to {target} and the following")
        layers, heads = self.k.shape[:2]
        slots = (c_int32 * (len(source) - skip))(*source[skip:])
        self._kernels.foretell_cache_move(
            self._kind, self.struct, layers, heads, self.head_dim, row, slots, len(slots), target + skip
        )


class _UpperHalves(NativeKVCache):
    """A cache read coarsely; see `NativeKVCache.upper_halves`."""

    _coarse = True
