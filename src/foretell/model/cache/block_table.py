"""Which blocks of a paged cache hold the tokens of every batch row."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import torch
from jaxtyping import Int

from foretell.utils.transfer import lazy_zeros

BLOCK_SLOTS = 64
"""Tokens of a block; `kCacheBlock` of csrc/cache.h."""
NO_BLOCK = -1
"""Entry of the table past the last block of a row."""


def blocks_for(slots: int) -> int:
    """Number of blocks that so many tokens need."""
    return -(-slots // BLOCK_SLOTS)


def with_blocks(part: torch.Tensor, needed: int, limit: int | None = None) -> torch.Tensor:
    """A tensor `[layers, heads, blocks, ...]` with room for so many blocks or more, at most `limit`: on the CPU for all
    of the limit, as what is not written takes no memory; else for twice as many, so that growing takes a constant time
    a token.
    """
    old = part.shape[2]
    if limit is not None and part.device.type == "cpu":
        size = max(needed, limit)
    else:
        # An odd number: heads whose distance is a power of two displace each other in the processor's caches.
        size = max(needed, 2 * old + 1 if limit is None else min(2 * old + 1, limit))
    new = lazy_zeros((*part.shape[:2], size, *part.shape[3:]), part)
    new[:, :, :old] = part
    return new


class OutOfBlocksError(Exception):
    """A cache whose number of blocks is limited has too few free ones: `missing` of them."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"the key-value cache is full, and needs room for {missing * BLOCK_SLOTS} more tokens")
        self.missing = missing


class BlockTable:
    """Allocates blocks to rows, with a reference count per block (paged attention: Kwon et al., arXiv 2309.06180).

    `table[row]` lists the blocks of a row. Blocks that several rows hold are full and never written. `limit`: maximum
    number of blocks; None: none.
    """

    def __init__(self) -> None:
        self.table: Int[np.ndarray, "r n"] = np.full((0, 0), NO_BLOCK, np.int32)
        self.limit: int | None = None
        self._held: list[int] = []
        """Number of blocks of every row."""
        self._references: list[int] = []
        """Number of rows that hold a block."""
        self._free: list[int] = []
        """Blocks that no row holds, a heap: a row that grows gets neighbours, which attention reads faster."""

    @property
    def blocks(self) -> int:
        """Number of blocks that memory is needed for."""
        return len(self._references)

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks that a row holds."""
        return len(self._references) - len(self._free)

    def slots(self, row: int) -> int:
        """Tokens that a row has room for."""
        return self._held[row] * BLOCK_SLOTS if row < len(self._held) else 0

    def cover(self, rows: Sequence[int], slots: Sequence[int]) -> bool:
        """Whether every one of these rows has room for so many tokens."""
        held = self._held
        pairs = zip(rows, slots, strict=True)
        return all(row < len(held) and count <= held[row] * BLOCK_SLOTS for row, count in pairs)

    def missing(self, rows: Sequence[int], slots: Sequence[int]) -> int:
        """Number of blocks to allocate so that every one of these rows has room for so many tokens."""
        return sum(max(0, blocks_for(n - self.slots(row))) for row, n in zip(rows, slots, strict=True))

    @property
    def free_blocks(self) -> int | None:
        """Number of blocks that can be allocated; None: any number."""
        return None if self.limit is None else self.limit - self.blocks_in_use

    def check_free(self, count: int) -> None:
        """Check that so many blocks can be allocated.

        Raises:
            OutOfBlocksError: there are fewer.
        """
        free = self.free_blocks
        if free is not None and free < count:
            raise OutOfBlocksError(count - free)

    def extend(self, row: int, slots: int) -> None:
        """Give a row room for so many tokens.

        Raises:
            OutOfBlocksError: there are too few blocks; then none is allocated.
        """
        needed = blocks_for(slots)
        self._hold_row(row, needed)
        held = self._held[row]
        if needed <= held:
            return
        self.check_free(needed - held)
        self.table[row, held:needed] = [self._allocate() for _ in range(needed - held)]
        self._held[row] = needed

    def truncate(self, row: int, slots: int) -> bool:
        """Give back the blocks past the first `slots` tokens of a row; whether the table changed."""
        kept = blocks_for(slots)
        if row >= len(self._held) or kept >= self._held[row]:
            return False
        for block in self.table[row, kept : self._held[row]].tolist():
            if block != NO_BLOCK:
                self._give_back(block)
        self.table[row, kept : self._held[row]] = NO_BLOCK
        self._held[row] = kept
        return True

    def release_first(self, row: int, count: int) -> bool:
        """Give back the first blocks of a row, whose tokens have no slots in this table then; whether it changed."""
        given = self.table[row, :count]
        held = given[given != NO_BLOCK].tolist()
        for block in held:
            self._give_back(block)
        self.table[row, :count] = NO_BLOCK
        return bool(held)

    def first_held(self, row: int) -> int:
        """Number of first blocks that a row has given back."""
        held = self.table[row, : self._held[row]] if row < len(self._held) else self.table[:0]
        return int(np.count_nonzero(held == NO_BLOCK))

    def share(self, source: int, target: int, slots: int) -> None:
        """Let the row `target`, which holds no block, hold the blocks that the first `slots` tokens of `source` fill.

        Raises:
            ValueError: the target holds blocks, or the source has fewer tokens.
        """
        count = slots // BLOCK_SLOTS
        self._hold_row(target, count)
        if self._held[target]:
            raise ValueError(f"row {target} holds {self._held[target]} blocks: give them back first")
        if slots > self.slots(source):
            raise ValueError(f"row {source} has room for {self.slots(source)} tokens: {slots} cannot be shared")
        self.table[target, :count] = self.table[source, :count]
        for block in self.table[target, :count].tolist():
            self._references[block] += 1
        self._held[target] = count

    def is_shared(self, row: int, index: int) -> bool:
        """Whether another row holds the block `index` of a row."""
        return self._references[int(self.table[row, index])] > 1

    def replace(self, row: int, index: int) -> tuple[int, int]:
        """Give a row a block of its own in place of a shared one; both blocks.

        Raises:
            OutOfBlocksError: there is no free block.
        """
        self.check_free(1)
        old, new = int(self.table[row, index]), self._allocate()
        self._give_back(old)
        self.table[row, index] = new
        return old, new

    def _allocate(self) -> int:
        if not self._free:
            self._free.append(len(self._references))
            self._references.append(0)
        block = heappop(self._free)
        self._references[block] = 1
        return block

    def _give_back(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            heappush(self._free, block)

    def _hold_row(self, row: int, blocks: int) -> None:
        """Grow the table to hold a row of so many blocks."""
        rows, width = self.table.shape
        if row < rows and blocks <= width:
            return
        grown = np.full((max(rows, row + 1), max(blocks, 2 * width if blocks > width else width)), NO_BLOCK, np.int32)
        grown[:rows, :width] = self.table
        self.table = grown
        self._held += [0] * (len(grown) - len(self._held))
