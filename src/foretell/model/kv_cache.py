"""The key-value cache of attention layers."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int

from foretell.model.cache import Cache
from foretell.model.linear import hadamard_matrix

_INTEGER_DTYPE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of as many bytes as a number of the cache."""
_SMALL_STEP, _LARGE_STEP, _SMALL_LIMIT = 256, 1024, 1024
"""The cache grows in steps of 256 slots up to 1024 slots, then in steps of 1024."""

_SLOT_BLOCK = 16
"""Slots that lie together in the caches of the kernels: the memory of a row is copied in whole blocks of them."""

_ROTATED_BLOCKS = 64, 16, 1
"""Dimensions that an int8 cache rotates together: as many as divide a head."""
INT8_LIMIT = 127
"""Largest int8 number of a quantised key or value: the scale of a token's head is its largest magnitude over this."""


class KVCache(Cache):
    """Keys and values of several batch rows, `[layers, rows, kv_heads, slots, head_dim]`; grows on demand.

    `int8`: numbers are int8, with one scale per token and head, and read as `dtype`. A head is rotated by a Hadamard
    matrix before, which spreads outliers over its dimensions (QuaRot, arXiv 2404.00456). Every token is quantised by
    itself when it is written, so that it does not matter what else is written in the same pass.
    """

    shared = False
    """Whether `k` and `v` are one tensor."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, int8: bool = False
    ) -> None:
        self.dtype = dtype
        self.k = torch.empty(layers, 0, kv_heads, 0, head_dim, dtype=torch.int8 if int8 else dtype, device=device)
        self.v = self.k if self.shared else torch.empty_like(self.k)
        self.k_scale: Float[torch.Tensor, "l r h s"] | None = None
        self.v_scale: Float[torch.Tensor, "l r h s"] | None = None
        if int8:
            self.k_scale = torch.empty(layers, 0, kv_heads, 0, device=device)
            self.v_scale = self.k_scale if self.shared else torch.empty_like(self.k_scale)
        self._movable = tuple(map(_movable_view, self._parts()))

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.k.shape[3]

    def _parts(self) -> list[torch.Tensor]:
        parts = (self.k, self.k_scale) if self.shared else (self.k, self.v, self.k_scale, self.v_scale)
        return [part for part in parts if part is not None]

    @property
    def rows(self) -> int:
        """Number of batch rows that there is room for."""
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(part.nbytes for part in self._parts())

    def reserve(self, rows: int, slots: int) -> None:
        """Grow to at least `rows` rows of `slots` tokens each; the contents stay."""
        layers, old_rows, heads, old_slots, _ = self.k.shape
        if rows <= old_rows and slots <= old_slots:
            return
        rows, step = max(rows, old_rows), _SMALL_STEP if slots <= _SMALL_LIMIT else _LARGE_STEP
        slots = max(old_slots, -(-slots // step) * step)
        for name in ("k", "k_scale") if self.shared else ("k", "v", "k_scale", "v_scale"):
            old: torch.Tensor | None = getattr(self, name)
            if old is None:
                continue
            new = old.new_zeros(layers, rows, heads, slots, *old.shape[4:])
            new[:, :old_rows, :, :old_slots] = old
            setattr(self, name, new)
        if self.shared:
            self.v, self.v_scale = self.k, self.k_scale
        self._movable = tuple(map(_movable_view, self._parts()))

    def write(
        self,
        layer: int,
        row: Int[torch.Tensor, " t"],
        slot: Int[torch.Tensor, " t"],
        k: Float[torch.Tensor, "t h d"],
        v: Float[torch.Tensor, "t h d"],
    ) -> None:
        """Store the keys and values of new tokens in their slots."""
        index = row, slice(None), slot
        sides = ((k, self.k, self.k_scale), (v, self.v, self.v_scale))
        for x, part, scales in sides[:1] if self.shared else sides:
            if scales is None:
                part[layer][index] = x.to(part.dtype)
                continue
            x = rotate_blocks(x.float())
            peak = x.abs().amax(-1, keepdim=True)
            part[layer][index] = (x * torch.where(peak > 0, INT8_LIMIT / peak, 0)).round().to(torch.int8)
            scales[layer][index] = peak[..., 0] / INT8_LIMIT

    def read(
        self, layer: int, rows: Int[torch.Tensor, " b"], slots: int
    ) -> tuple[Float[torch.Tensor, "b h s d"], Float[torch.Tensor, "b h s d"]]:
        """Keys and values of the first slots of some rows."""

        def read(part: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            found = part[layer].index_select(0, rows)[:, :, :slots]
            if scales is None:
                return found
            wide = rotate_blocks(found * scales[layer].index_select(0, rows)[:, :, :slots, None])
            out: torch.Tensor = wide.to(self.dtype)
            return out

        return read(self.k, self.k_scale), read(self.v, self.v_scale)

    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep these nodes of the row's last tree, node `j` in slot `length + j`, as the tokens after `length`."""
        self.move(row, [length + node for node in path], length)

    def move(self, row: int, source: Sequence[int], target: int) -> None:
        """Copy the slots `source` of a row to `target, target+1, …`; source and target may overlap."""
        skip = next((i for i, s in enumerate(source) if s != target + i), len(source))
        if skip == len(source):
            return
        source, target = list(source[skip:]), target + skip
        for part in self._movable:
            part[:, row, :, target : target + len(source)] = part[:, row][:, :, source]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first slots of row `source` to row `target`."""
        end = min(-(-length // _SLOT_BLOCK) * _SLOT_BLOCK, self.slots)
        for part in self._parts():
            part[:, target, :, :end] = part[:, source, :, :end]


class LatentCache(KVCache):
    """What latent attention keeps of a token: one vector that is key and value of all heads."""

    shared = True


def rotate_blocks(x: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t d"]:
    """Every head times a Hadamard matrix over blocks of its dimensions, the same in both directions."""
    size = next(block for block in _ROTATED_BLOCKS if x.shape[-1] % block == 0)
    return (x.unflatten(-1, (-1, size)) @ hadamard_matrix(size, x.device)).flatten(-2)


def _movable_view(part: torch.Tensor) -> Any:
    """The memory that `move` indexes: on the CPU a NumPy view as integers, which takes a third of torch's time."""
    return part.view(_INTEGER_DTYPE[part.element_size()]).numpy() if part.device.type == "cpu" else part
