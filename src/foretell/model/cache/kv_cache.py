"""The key-value cache of attention layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.cache.base import Cache
from foretell.model.cache.block_table import BLOCK_SLOTS, BlockTable, blocks_for, with_blocks
from foretell.model.cache.numbers import quantize, rotate_blocks, widen
from foretell.model.cache.packed_groups import GROUP_SLOTS, KIVI_BITS, PackedGroups, packed_slots
from foretell.model.config.model import CacheDtype
from foretell.utils.inference import in_inference_mode
from foretell.utils.transfer import movable_view, to_device


class KVCache(Cache):
    """Keys and values in blocks of `BLOCK_SLOTS` tokens, `[layers, kv_heads, blocks, BLOCK_SLOTS, head_dim]`.

    A table names the blocks of every batch row; rows that begin alike share blocks (paged attention: Kwon et al., arXiv
    2309.06180). A row writes to blocks of its own only: those from its last, incomplete one on.

    `numbers`: int8, fp8 and int4 have one scale per token and head, see `cache_numbers`, and are read as `dtype`.
    """

    shared = False
    """Whether `k` and `v` are one tensor."""
    splits = False
    """Whether int8 numbers can lie in halves."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        numbers: CacheDtype = "auto",
    ) -> None:
        self.dtype, self.blocks, self.head_dim = dtype, BlockTable(), head_dim
        self.bits = 4 if numbers == "int4" else 8
        """Of a number with a scale."""
        self.floats = numbers == "fp8"
        """Whether numbers with a scale are 8-bit floats."""
        self._halves = numbers == "int8-halves" and self.splits
        stored = head_dim // 2 if self.bits == 4 or self._halves else head_dim
        self.packed = (
            PackedGroups(layers, kv_heads, head_dim, KIVI_BITS[numbers], device) if numbers in KIVI_BITS else None
        )
        """Older keys and values in groups of few bits; None: there are none."""
        self.any_length = self.packed is None
        whole = numbers == "auto" or self.packed is not None
        number = dtype if whole else torch.int8
        self.k = torch.empty(layers, kv_heads, 0, BLOCK_SLOTS, stored, dtype=number, device=device)
        self.v = self.k if self.shared else torch.empty_like(self.k)
        self.k_scale: Float[torch.Tensor, "l h n s"] | None = None
        self.v_scale: Float[torch.Tensor, "l h n s"] | None = None
        self.k_low = torch.empty_like(self.k) if self._halves else None
        self.v_low = torch.empty_like(self.v) if self._halves else None
        if not whole:
            self.k_scale = torch.empty(layers, kv_heads, 0, BLOCK_SLOTS, device=device)
            self.v_scale = self.k_scale if self.shared else torch.empty_like(self.k_scale)
        self.table: Int[torch.Tensor, "r n"] = torch.from_numpy(self.blocks.table).to(device)
        """The table of the blocks on the cache's device; on the CPU it is the same memory."""
        self._movable = tuple(map(movable_view, self._parts()))

    def _parts(self) -> list[torch.Tensor]:
        return [part for name in self._names if (part := getattr(self, name)) is not None]

    @property
    def _names(self) -> tuple[str, ...]:
        """Attributes that hold keys, values and scales, each once."""
        if self.shared:
            return "k", "k_scale"
        return "k", "v", "k_scale", "v_scale", "k_low", "v_low"

    @property
    def rows(self) -> int:
        """Number of batch rows that there is room for."""
        return len(self.blocks.table)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and scales of all blocks that were ever held."""
        return self.block_bytes * self.blocks.blocks + (self.packed.nbytes if self.packed else 0)

    def reserve(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Give each of these rows room for so many tokens; see `Cache.reserve`."""
        if not self.blocks.cover(rows, slots):
            self.blocks.check_free(self.blocks.missing(rows, slots))
            for row, count in zip(rows, slots, strict=True):
                self.blocks.extend(row, count)
            self._grow()
        if self.packed is not None:
            for row, count in zip(rows, slots, strict=True):
                self.packed.reserve(row, count)

    def limit(self, nbytes: int) -> None:
        """Never use more than so many bytes; at least one block is allowed."""
        block = self.block_bytes + (self.packed.block_bytes if self.packed else 0)
        if block:
            self.blocks.limit = max(1, nbytes // block)
            if self.packed is not None:
                self.packed.blocks.limit = self.blocks.limit

    @property
    def free_slots(self) -> int | None:
        """Tokens that there is room for in blocks that no row holds; None: any number."""
        free = self.blocks.free_blocks
        return None if free is None else free * BLOCK_SLOTS

    def _grow(self) -> None:
        """Make room for all blocks of the table."""
        if (needed := self.blocks.blocks) > self.k.shape[2]:
            self._replace_parts(lambda part: with_blocks(part, needed, self.blocks.limit))
        self._copy_table()

    def _replace_parts(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace keys, values and scales by what `make` makes of them."""
        for name in self._names:
            part: torch.Tensor | None = getattr(self, name)
            if part is not None:
                setattr(self, name, make(part))
        if self.shared:
            self.v, self.v_scale = self.k, self.k_scale
        self._movable = tuple(map(movable_view, self._parts()))

    def add_layers(self, count: int) -> int:
        """Make room for further layers of the same sizes, and return the index of the first one. Their keys and values
        of tokens that rows hold already are zeros.
        """
        first = len(self.k)
        self._replace_parts(lambda part: torch.cat([part, part.new_zeros(count, *part.shape[1:])]))
        return first

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers; 0: a network without attention has no layers here."""
        return sum(math.prod((*part.shape[:2], *part.shape[3:])) * part.element_size() for part in self._parts())

    @in_inference_mode
    def _copy_table(self) -> None:
        """Follow a change of the table of the blocks, inside of inference mode and outside."""
        table = torch.from_numpy(self.blocks.table)
        if self.table.device.type != "cpu" and self.table.shape == table.shape:
            self.table.copy_(table, non_blocking=True)
        else:
            self.table = to_device(table, self.k.device)

    def write(
        self,
        layer: int,
        row: Int[torch.Tensor, " t"],
        slot: Int[torch.Tensor, " t"],
        k: Float[torch.Tensor, "t h d"],
        v: Float[torch.Tensor, "t h d"],
    ) -> None:
        """Store the keys and values of new tokens in their slots."""
        index = slice(None), self.table[row, slot // BLOCK_SLOTS].long(), slot % BLOCK_SLOTS
        sides = ((k, self.k, self.k_scale), (v, self.v, self.v_scale))
        for x, part, scales in sides[:1] if self.shared else sides:
            if scales is None:
                part[layer][index] = x.transpose(0, 1).to(part.dtype)
                continue
            part[layer][index], scales[layer][index] = quantize(
                rotate_blocks(x.transpose(0, 1).float()), self.bits, self.floats
            )
        if self.packed is not None:
            for which in row.unique().tolist():
                self._pack(layer, which, packed_slots(int(slot[row == which].max())))

    def _pack(self, layer: int, row: int, slots: int) -> None:
        """Pack a row's groups below a slot, as far as they are not packed in all layers."""
        assert self.packed is not None
        for first in range(int(self.packed.done[row]), slots, GROUP_SLOTS):
            block, at = int(self.blocks.table[row, first // BLOCK_SLOTS]), first % BLOCK_SLOTS
            k, v = (part[layer, :, block, at : at + GROUP_SLOTS] for part in (self.k, self.v))
            self.packed.pack(layer, row, first, k, v)

    def read(
        self, layer: int, rows: Int[torch.Tensor, " b"], slots: int
    ) -> tuple[Float[torch.Tensor, "b h s d"], Float[torch.Tensor, "b h s d"]]:
        """Keys and values of the first slots of some rows."""
        return self.read_keys(layer, rows, slots), self._read(self.v, self.v_scale, layer, rows, slots)

    def read_keys(self, layer: int, rows: Int[torch.Tensor, " b"], slots: int) -> Float[torch.Tensor, "b h s d"]:
        """Keys of the first slots of some rows."""
        return self._read(self.k, self.k_scale, layer, rows, slots)

    def _read(
        self, part: torch.Tensor, scales: torch.Tensor | None, layer: int, rows: Int[torch.Tensor, " b"], slots: int
    ) -> Float[torch.Tensor, "b h s d"]:
        blocks = self.table[rows, : blocks_for(slots)].clamp(min=0).flatten()  # what no query sees may come from any

        def gather(numbers: torch.Tensor) -> torch.Tensor:
            stored: torch.Tensor = numbers[layer].index_select(1, blocks)
            return stored.view(len(stored), len(rows), -1, *stored.shape[3:]).transpose(0, 1)[:, :, :slots]

        if scales is None:
            return gather(part)
        out: torch.Tensor = rotate_blocks(widen(gather(part), self.bits, self.floats) * gather(scales)[..., None]).to(
            self.dtype
        )
        return out

    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep these nodes of the row's last tree, node `j` in slot `length + j`, as the tokens after `length`."""
        if list(path) != list(range(len(path))):
            self.move(row, [length + node for node in path], length)
        if self.packed is not None:
            done = self.packed.keep(row, length + len(path))
            if self.blocks.release_first(row, done // BLOCK_SLOTS):
                self._copy_table()

    def restorable(self, row: int, length: int) -> int:
        """All of the tokens up to `length`, or none: where what the next token reads whole is packed already."""
        if self.packed is None or not length:
            return length
        return length if packed_slots(length - 1) >= self.blocks.first_held(row) * BLOCK_SLOTS else 0

    def move(self, row: int, source: Sequence[int], target: int) -> None:
        """Copy the slots `source` of a row to `target, target+1, …`; source and target may overlap."""
        skip = next((i for i, s in enumerate(source) if s != target + i), len(source))
        if skip == len(source):
            return
        read: Any = self._places(row, source[skip:])
        write: Any = self._places(row, range(target + skip, target + len(source)))
        if self.k.device.type != "cpu":
            read, write = to_device(np.stack([*read, *write]).astype(np.int64), self.k.device).view(2, 2, -1)
        for part in self._movable:
            part[:, :, write[0], write[1]] = part[:, :, read[0], read[1]]

    def copy_slots(
        self, source: "KVCache", source_row: int, slots: Int[np.ndarray, "l h n"], row: int, target: int
    ) -> None:
        """Copy slots of a row of another cache of the same kind, other ones for every layer and head, to
        `target, target+1, …` of a row of this one, which has room for them.

        Within one row of one cache, the slots of a head ascend, and none is copied to a later one.
        """
        layers, heads, count = slots.shape
        index = torch.from_numpy(np.array(slots)).long().to(self.k.device)
        read = source.table[source_row].long()[index // BLOCK_SLOTS], index % BLOCK_SLOTS
        places = torch.arange(target, target + count, device=self.k.device)
        write = self.table[row].long()[places // BLOCK_SLOTS], places % BLOCK_SLOTS
        layer, head = torch.arange(layers, device=index.device)[:, None, None], torch.arange(heads, device=index.device)
        for part, other in zip(self._parts(), source._parts(), strict=True):
            part[layer, head[:, None], *write] = other[layer, head[:, None], *read]

    def _places(self, row: int, slots: Sequence[int]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """The block of each of these slots of a row, and the slot in the block."""
        index = np.asarray(slots)
        return self.blocks.table[row, index // BLOCK_SLOTS], index % BLOCK_SLOTS

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on, and give back their blocks.

        Raises:
            OutOfBlocksError: the last block is shared, and there is none for a copy.
        """
        if self.packed is not None:
            self.packed.truncate(row, length)
        changed, last = self.blocks.truncate(row, length), length // BLOCK_SLOTS
        if length % BLOCK_SLOTS and self.blocks.slots(row) > length and self.blocks.is_shared(row, last):
            source, target = self.blocks.replace(row, last)
            self._grow()
            self._copy_block(source, target)
        elif changed:
            self._copy_table()

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of a row those of another: both hold the full blocks, and the last one is copied.

        Raises:
            OutOfBlocksError: there is no block for the copy.
        """
        self.truncate(target, 0)
        if self.packed is not None:
            self._copy_packed(source, target, length)
            return
        incomplete = length % BLOCK_SLOTS > 0
        self.blocks.check_free(incomplete)
        self.blocks.share(source, target, length)
        self._copy_table()
        if incomplete:
            self.reserve([target], [length])
            last = length // BLOCK_SLOTS
            self._copy_block(*(int(self.blocks.table[row, last]) for row in (source, target)))

    def _copy_packed(self, source: int, target: int, length: int) -> None:
        """`copy_row` where older tokens are packed: blocks are copied, not shared."""
        assert self.packed is not None
        self.reserve([target], [length])
        self.packed.copy_row(source, target, length)
        first = int(self.packed.done[target]) // BLOCK_SLOTS
        for i in range(first, blocks_for(length)):
            self._copy_block(*(int(self.blocks.table[row, i]) for row in (source, target)))
        if self.blocks.release_first(target, first):
            self._copy_table()

    def _copy_block(self, source: int, target: int) -> None:
        for part in self._parts():
            part[:, :, target] = part[:, :, source]


class LatentCache(KVCache):
    """What latent attention keeps of a token: one vector that is key and value of all heads."""

    shared = True
