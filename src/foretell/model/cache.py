"""Keys and values of everything read so far, and where the tokens of one call belong among them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.tree import TokenTree

_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As large as the numbers of a cache."""


@dataclass(frozen=True)
class Layout:
    """Where `t` new tokens stand: several texts flattened, without padding.

    A token sees slots `0 .. prefix-1` of its row in order, then its `extra` slots in order, the last of which is its
    own unless the prefix already reaches it. Chains need no extras: their prefix covers the chain. All new keys are
    written before any query reads.
    """

    row: Int[torch.Tensor, " t"]
    slot: Int[torch.Tensor, " t"]
    position: Int[torch.Tensor, " t"]
    prefix: Int[torch.Tensor, " t"]
    extra: Int[torch.Tensor, "t m"]
    """Slots, root first; padded with -1 at the end. All tensors int32 on the host."""

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return len(self.row)

    @staticmethod
    def of(
        tree: TokenTree, rows: Sequence[int], length: Int[np.ndarray, " b"], read: Bool[np.ndarray, "b n"]
    ) -> "tuple[Layout, Int[np.ndarray, 'b n']]":
        """Layout of the nodes of a tree that are read now, node `j` in slot `length + j`; and each node's index in it
        (-1: not read now).

        Ancestors that are not read now must be in the cache already. Example, length 5, a root with two children:
        prefixes 6, 7, 6, extras [], [], [7].
        """
        # Lists: on trees as small as most are, arrays cost several times as much.
        of, slot, position, prefix, extras = list[int](), list[int](), list[int](), list[int](), list[list[int]]()
        for i, (row, base) in enumerate(zip(rows, length.tolist(), strict=True)):
            wanted, depth = read[i].tolist(), tree.depth[i].tolist()
            for node, (reach, beyond) in enumerate(_visible(tree, i, base)):
                if wanted[node]:
                    of.append(row)
                    slot.append(base + node)
                    position.append(base + depth[node])
                    prefix.append(reach)
                    extras.append(beyond)
        most = max(map(len, extras), default=0)
        extra = np.array([slots + [-1] * (most - len(slots)) for slots in extras], np.int32)
        parts = (of, slot, position, prefix)
        found = *(np.array(part, np.int32) for part in parts), extra.reshape(len(extras), most)
        return Layout(*map(torch.from_numpy, found)), numbered(read)


def numbered(marked: Bool[np.ndarray, "b n"]) -> Int[np.ndarray, "b n"]:
    """Numbers the marked places row by row; -1: not marked."""
    out = np.full(marked.shape, -1)
    out[marked] = np.arange(np.count_nonzero(marked))
    return out


def _visible(tree: TokenTree, i: int, base: int) -> Iterator[tuple[int, list[int]]]:
    """Prefix and extras of the nodes of text `i`: a node extends its parent's prefix where its slot is the next one."""
    prefix_length, reach, beyond = int(tree.prefix_length[i]), list[int](), list[list[int]]()
    for node, parent in enumerate(tree.parent[i].tolist()):
        slot = base + node
        if node < prefix_length:
            reach.append(slot + 1)
            beyond.append([])
        else:
            straight = parent >= 0 and not beyond[parent] and reach[parent] == slot
            reach.append(slot + 1 if straight else reach[parent])
            beyond.append([] if straight else [*beyond[parent], slot])
        yield reach[node], beyond[node]


class KVCache:
    """Keys and values of several rows, `[layers, rows, kv_heads, slots, head_dim]`; grows on demand, shares nothing
    with the weights.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.empty(layers, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        self._parts = _movable(self.k), _movable(self.v)

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for at least `rows` rows of `slots` tokens each, keeping what is there."""
        layers, have_rows, heads, have_slots, dim = self.k.shape
        if rows <= have_rows and slots <= have_slots:
            return
        rows = max(rows, have_rows)
        slots = max(have_slots, -(-slots // 256) * 256 if slots <= 1024 else -(-slots // 1024) * 1024)
        for name in ("k", "v"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros(layers, rows, heads, slots, dim)
            new[:, :have_rows, :, :have_slots] = old
            setattr(self, name, new)
        self._parts = _movable(self.k), _movable(self.v)

    def write(
        self,
        layer: int,
        row: Int[torch.Tensor, " t"],
        slot: Int[torch.Tensor, " t"],
        k: Float[torch.Tensor, "t h d"],
        v: Float[torch.Tensor, "t h d"],
    ) -> None:
        """Store the keys and values of new tokens in their slots."""
        at = row, slice(None), slot
        self.k[layer][at] = k.to(self.k.dtype)
        self.v[layer][at] = v.to(self.v.dtype)

    def move(self, row: int, source: Sequence[int], target: int) -> None:
        """Gather the slots `source` of a row to `target, target+1, …` (through a temporary: they may overlap)."""
        skip = next((i for i, s in enumerate(source) if s != target + i), len(source))
        if skip == len(source):
            return
        source, target = list(source[skip:]), target + skip
        for part in self._parts:
            part[:, row, :, target : target + len(source)] = part[:, row][:, :, source]


def _movable(part: torch.Tensor) -> Any:
    """What slots are moved in: on processors the same memory as an array of plain numbers, which takes a third of the
    time.
    """
    return part.view(_NUMBERS[part.element_size()]).numpy() if part.device.type == "cpu" else part
