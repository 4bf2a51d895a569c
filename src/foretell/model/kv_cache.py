"""The key-value cache of attention layers."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int

from foretell.model.cache import Cache

_INTEGER_DTYPE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of as many bytes as a number of the cache."""
_SMALL_STEP, _LARGE_STEP, _SMALL_LIMIT = 256, 1024, 1024
"""The cache grows in steps of 256 slots up to 1024 slots, then in steps of 1024."""


class KVCache(Cache):
    """Keys and values of several batch rows, `[layers, rows, kv_heads, slots, head_dim]`; grows on demand."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.empty(layers, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        self._movable = _movable_view(self.k), _movable_view(self.v)

    @property
    def rows(self) -> int:
        """Number of batch rows that there is room for."""
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes

    def reserve(self, rows: int, slots: int) -> None:
        """Grow to at least `rows` rows of `slots` tokens each; the contents stay."""
        layers, old_rows, heads, old_slots, dim = self.k.shape
        if rows <= old_rows and slots <= old_slots:
            return
        rows, step = max(rows, old_rows), _SMALL_STEP if slots <= _SMALL_LIMIT else _LARGE_STEP
        slots = max(old_slots, -(-slots // step) * step)
        for name in ("k", "v"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros(layers, rows, heads, slots, dim)
            new[:, :old_rows, :, :old_slots] = old
            setattr(self, name, new)
        self._movable = _movable_view(self.k), _movable_view(self.v)

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
        self.k[layer][index] = k.to(self.k.dtype)
        self.v[layer][index] = v.to(self.v.dtype)

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


def _movable_view(part: torch.Tensor) -> Any:
    """The memory that `move` indexes: on the CPU a NumPy view as integers, which takes a third of torch's time."""
    return part.view(_INTEGER_DTYPE[part.element_size()]).numpy() if part.device.type == "cpu" else part
