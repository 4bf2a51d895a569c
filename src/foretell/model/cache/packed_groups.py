"""Keys and values of few bits in groups of tokens: KIVI (arXiv 2402.02750), `int4-kivi` and `int2-kivi`.

Keys are rounded per dimension over the tokens of a group, values per token over as many dimensions: a number is
`least + level * step`. The newest tokens are kept whole beside the groups. Which of the two a token reads depends on
its position alone (`packed_slots`), so its numbers do not depend on chunks, drafts or the batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from foretell.model.cache.block_table import BLOCK_SLOTS, BlockTable, blocks_for, with_blocks

GROUP_SLOTS = 32
"""Tokens of a group of keys, and dimensions of a group of values; `kGroupSlots` of csrc/packed_groups.h."""
RESIDUAL = 128
"""A token reads a group where its last token lies so many positions before it, or more."""
KIVI_BITS = {"int4-kivi": 4, "int2-kivi": 2}
"""Bits of a level, by the name of the cache's dtype."""
_LANES = 16


def packed_slots(position: int) -> int:
    """The first slots of a text of which the token at a position reads packed numbers; all below it are multiples of
    `GROUP_SLOTS`.
    """
    return max(0, position - RESIDUAL) // GROUP_SLOTS * GROUP_SLOTS


def round_groups(
    x: Float[torch.Tensor, "*g n"], bits: int
) -> tuple[Int[torch.Tensor, "*g n"], Float[torch.Tensor, "*g"], Float[torch.Tensor, "*g"]]:
    """Levels of groups of numbers, and the least number and the step of every group, which are bfloat16 numbers."""
    least = x.amin(-1).bfloat16().float()
    step = ((x.amax(-1) - least) / (2**bits - 1)).bfloat16().float()
    inverse = torch.where(step > 0, 1 / step, 0)
    levels = ((x - least[..., None]) * inverse[..., None]).clamp(0, 2**bits - 1).round()
    return levels.to(torch.int32), least, step


class PackedGroups:
    """The packed groups of a cache: `[layers, kv_heads, blocks, ...]` per block of `BLOCK_SLOTS` tokens, as
    csrc/packed_groups.h lays them out.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, bits: int, device: torch.device) -> None:
        self.bits, self.head_dim, self.blocks = bits, head_dim, BlockTable()
        size = BLOCK_SLOTS * head_dim * bits // 8
        self.k = torch.zeros(layers, kv_heads, 0, size, dtype=torch.uint8, device=device)
        self.v = torch.zeros_like(self.k)
        ranges = BLOCK_SLOTS * head_dim // GROUP_SLOTS
        self.k_range = torch.zeros(layers, kv_heads, 0, ranges, 2, dtype=torch.bfloat16, device=device)
        self.v_range = torch.zeros_like(self.k_range)
        self.done: Int[np.ndarray, " r"] = np.zeros(0, np.int32)
        """Slots of every row, from the first one on, that are packed in all layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        layers, heads, _, size = self.k.shape
        return layers * heads * 2 * (size + 4 * self.k_range.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.block_bytes * self.k.shape[2]

    def reserve(self, row: int, slots: int) -> None:
        """Make room for the groups that a text of so many tokens has."""
        self.blocks.extend(row, packed_slots(max(0, slots - 1)))
        if row >= len(self.done):
            self.done = np.pad(self.done, (0, row + 1 - len(self.done)))
        if (needed := self.blocks.blocks) > self.k.shape[2]:
            for name in ("k", "v", "k_range", "v_range"):
                setattr(self, name, with_blocks(getattr(self, name), needed))

    def keep(self, row: int, length: int) -> int:
        """Note that a pass has read the last of `length` tokens that are kept; slots of its packed groups."""
        self.done[row] = packed_slots(max(0, length - 1))
        return int(self.done[row])

    def truncate(self, row: int, length: int) -> None:
        """Forget the groups that no token after the first `length` ones reads."""
        if row < len(self.done):
            self.done[row] = min(int(self.done[row]), packed_slots(max(0, length - 1)))
            self.blocks.truncate(row, int(self.done[row]))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the groups of the first tokens of a row those of another."""
        self.reserve(target, length)
        self.done[target] = packed_slots(max(0, length - 1))
        for i in range(blocks_for(int(self.done[target]))):
            read, write = (int(self.blocks.table[row, i]) for row in (source, target))
            for part in (self.k, self.v, self.k_range, self.v_range):
                part[:, :, write] = part[:, :, read]

    def pack(
        self, layer: int, row: int, slot: int, k: Float[torch.Tensor, "h s d"], v: Float[torch.Tensor, "h s d"]
    ) -> None:
        """Pack the keys and values of the group from a slot on."""
        block, i = int(self.blocks.table[row, slot // BLOCK_SLOTS]), slot % BLOCK_SLOTS // GROUP_SLOTS
        heads, _, d = k.shape
        by_dimension = round_groups(k.float().transpose(1, 2), self.bits)
        by_token = round_groups(v.float().unflatten(2, (-1, GROUP_SLOTS)), self.bits)
        for levels, ranges, (level, *least_and_step) in (
            (self.k, self.k_range, by_dimension),
            (self.v, self.v_range, by_token),
        ):
            size = levels.shape[3] // (BLOCK_SLOTS // GROUP_SLOTS)
            levels[layer, :, block, i * size : (i + 1) * size] = self._to_bytes(level.reshape(heads, -1, _LANES))
            both = torch.stack([part.reshape(heads, d) for part in least_and_step], -1)
            ranges[layer, :, block, i * d : (i + 1) * d] = both.bfloat16()

    def _to_bytes(self, vectors: Int[torch.Tensor, "h n 16"]) -> UInt8[torch.Tensor, "h m"]:
        per_byte = 8 // self.bits
        shifts = torch.arange(per_byte, device=vectors.device) * self.bits
        return (vectors.unflatten(1, (-1, per_byte)) << shifts[:, None]).sum(2).to(torch.uint8).flatten(1)

    def read(
        self, layer: int, rows: Sequence[int], slots: int, dtype: torch.dtype
    ) -> tuple[Float[torch.Tensor, "b h s d"], Float[torch.Tensor, "b h s d"]]:
        """Keys and values of the first slots of some rows, a multiple of `GROUP_SLOTS`; of slots that are not packed
        any numbers.
        """
        count, d = blocks_for(slots), self.head_dim
        blocks = torch.from_numpy(self.blocks.table[list(rows), :count].clip(0)).to(self.k.device).long()
        out = []
        for levels, ranges in ((self.k, self.k_range), (self.v, self.v_range)):
            heads = levels.shape[1]
            packed_levels = levels[layer][:, blocks.flatten()].view(heads, len(rows), count * 2, -1, _LANES)
            shifts = torch.arange(8 // self.bits, device=packed_levels.device) * self.bits
            level = (packed_levels[..., None, :].int() >> shifts[:, None]) & (2**self.bits - 1)
            least, step = ranges[layer][:, blocks.flatten()].view(heads, len(rows), count * 2, d, 2).float().unbind(-1)
            if levels is self.k:  # [dimension][slot]
                level = level.reshape(heads, len(rows), count * 2, d, GROUP_SLOTS)
                numbers = (level * step[..., None] + least[..., None]).transpose(3, 4)
            else:  # [slot][group of dimensions][dimension]
                level = level.reshape(heads, len(rows), count * 2, d, GROUP_SLOTS)
                numbers = (level * step[..., None] + least[..., None]).reshape(*level.shape[:3], GROUP_SLOTS, d)
            out.append(numbers.reshape(heads, len(rows), -1, d).transpose(0, 1)[:, :, :slots].to(dtype))
        return out[0], out[1]
