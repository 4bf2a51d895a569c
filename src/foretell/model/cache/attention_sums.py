"""How much attention every cached key has received so far: the scores of H2O (arXiv 2306.14048)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.cache.base import Cache
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig

_MOST_PENDING = 64
"""Tokens whose queries are held before their weights are added: one reading of the keys serves all of them."""


@dataclass
class _Pending:
    """Queries of a row's newest tokens, the first of which is in slot `first`, whose weights are not yet added."""

    first: int
    queries: list[Float[torch.Tensor, "l t h e"]]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return sum(part.shape[1] for part in self.queries)

    def truncate(self, slots: int) -> None:
        """Forget the tokens from slot `slots` on."""
        self.queries = [torch.cat(self.queries, 1)[:, : max(0, slots - self.first)]]


class AttentionSums:
    """For every row, layer, key-value head and slot: the sum of the softmax weights that the key received from all
    tokens after it and from its own, over the query heads of the group.

    Passes record the queries (`record`); those of tokens that are kept are added (`commit`). Drafts that were rejected
    add nothing.
    """

    def __init__(self, cache: Cache, config: ModelConfig) -> None:
        self._cache, self._config = cache, config
        self._sums: dict[int, Float[torch.Tensor, "l g n"]] = {}
        self._pending: dict[int, _Pending] = {}
        self._passed: dict[int, tuple[Float[torch.Tensor, "l t h e"], Int[np.ndarray, " n"]]] = {}
        """Of every row of the last pass: its queries, and the index among them of every node."""

    def record(self, layout: Layout, rows: Sequence[int], index: Int[np.ndarray, "b n"]) -> Layout:
        """The layout of a pass with room for its queries; `index`: of every node in the layout, -1: not read."""
        c = self._config
        queries = torch.zeros(c.layers, layout.token_count, c.heads, c.head_dim, device=self._store.k.device)
        for i, row in enumerate(rows):
            self._passed[row] = queries, index[i]
        return replace(layout, queries=queries)

    @property
    def _store(self) -> KVCache:
        assert isinstance(self._cache, KVCache)
        return self._cache

    def commit(self, row: int, path: Sequence[int], slots: int) -> None:
        """Count these nodes of the row's last pass, which are now in `slots, slots+1, …`."""
        if not path or row not in self._passed:
            return
        queries, index = self._passed.pop(row)
        if row in self._pending and self._pending[row].first + self._pending[row].count != slots:
            self._add(row)
        pending = self._pending.setdefault(row, _Pending(slots, []))
        pending.queries.append(queries[:, torch.from_numpy(index[list(path)])])
        if pending.count >= _MOST_PENDING:
            self._add(row)

    def of(self, row: int, slots: int) -> Float[torch.Tensor, "l g n"]:
        """The sums of the first slots of a row; 0 for those of tokens that no pass has recorded."""
        self._add(row)
        c = self._config
        sums = self._sums.get(row, torch.zeros(c.layers, c.kv_heads, 0, device=self._store.k.device))
        return _widened(sums, slots)[:, :, :slots]

    def _add(self, row: int) -> None:
        """Add the weights of the pending queries."""
        pending = self._pending.pop(row, None)
        if pending is None or not pending.count:
            return
        c, queries = self._config, torch.cat(pending.queries, 1)
        slots = pending.first + queries.shape[1]
        sums = _widened(self._sums.get(row, queries.new_zeros(c.layers, c.kv_heads, 0)), slots)
        own = torch.arange(pending.first, slots, device=queries.device).repeat(c.heads // c.kv_heads)
        hidden = torch.arange(slots, device=queries.device) > own[:, None]
        which = torch.tensor([row], device=self._store.k.device)
        for layer in range(c.layers):
            keys = self._store.read_keys(layer, which, slots)[0].float()
            by_head = queries[layer].view(-1, c.kv_heads, c.heads // c.kv_heads, c.head_dim).permute(1, 2, 0, 3)
            scores = by_head.flatten(1, 2) @ keys.transpose(1, 2) * c.scale
            sums[layer] += scores.masked_fill_(hidden, float("-inf")).softmax(-1).sum(1)
        self._sums[row] = sums

    def keep_slots(self, row: int, slots: Int[np.ndarray, "l g b"]) -> None:
        """Keep these slots only, which move to `0, 1, …`."""
        self._sums[row] = self._sums[row].gather(2, torch.from_numpy(slots).long().to(self._sums[row].device))

    def truncate(self, row: int, slots: int) -> None:
        """Forget a row's slots from `slots` on; earlier keys keep what later tokens have given them."""
        self._passed.pop(row, None)
        if row in self._pending:
            self._pending[row].truncate(slots)
        if row in self._sums:
            self._sums[row] = self._sums[row][:, :, :slots]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the first slots of a row those of another."""
        self._sums[target] = self.of(source, length).clone()
        self._pending.pop(target, None)


def _widened(sums: Float[torch.Tensor, "l g n"], slots: int) -> Float[torch.Tensor, "l g m"]:
    """With zeros for further slots."""
    missing = max(0, slots - sums.shape[2])
    return torch.cat((sums, sums.new_zeros(*sums.shape[:2], missing)), 2) if missing else sums
