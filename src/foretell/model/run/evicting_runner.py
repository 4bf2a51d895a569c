"""A target that forgets keys and values of long texts for good: lossy."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.block.backend import Backend
from foretell.model.cache.policy import CachePolicy
from foretell.model.run.compact_runner import CompactRunner, select_slots
from foretell.model.run.network import Network
from foretell.model.run.runner import Layers, Marks, Rows

EVICTION_INTERVAL = 64
"""Tokens by which a row may exceed the budget until keys are evicted."""


class EvictingRunner(CompactRunner):
    """A target whose rows keep the keys and values that a policy selects, about `budget` per layer and head.

    A prompt is read whole. While an answer is decoded, keys and values beyond the budget and `EVICTION_INTERVAL` more
    are evicted, and their memory is freed. The keys that are left keep their positions in the text. Later tokens do not
    see what was evicted, so the text is not that of the model: lossy. Where a method has several tokens accepted in a
    pass, an eviction may come some tokens later than in plain decoding.

    Raises:
        ValueError: see `check_compactible`.
    """

    def __init__(self, network: Network, policy: CachePolicy) -> None:
        super().__init__(network)
        self.policy = policy
        if policy.accumulates:
            self.record_attention()
        self._tokens: dict[int, list[int]] = {}
        """All tokens of every row."""
        self._read: dict[int, tuple[list[int], bool]] = {}
        """Tokens of the row's nodes in the last tree, and whether the row is decoded."""

    @property
    def backend(self) -> Backend:
        """The network's, with the policy; what a token sees depends on how many were accepted in a pass."""
        return replace(self.network.backend, batch_invariant=False, cache_policy=str(self.policy))

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree; see `Runner.forward`."""
        for i, row in enumerate(rows):
            self._read[row] = tree.token[i].tolist(), int(tree.prefix_length[i]) == 1
        return super().forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)

    @torch.inference_mode()
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree, and evict what is beyond the budget."""
        super().commit(row, path)
        nodes, is_decode = self._read[row]
        self._tokens.setdefault(row, []).extend(nodes[j] for j in path)
        if is_decode and self.slots(row) > self.policy.budget + EVICTION_INTERVAL:
            self._evict(row)

    def _evict(self, row: int) -> None:
        slots = select_slots(self, row, self.policy, self._tokens[row], self.slots(row))
        self.store.copy_slots(self.store, row, slots, row, 0)
        if self.attention_sums is not None:
            self.attention_sums.keep_slots(row, slots)
        self.missing[row] = self.length(row) - slots.shape[2]
        self.cache.truncate(row, slots.shape[2])

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; all of them where keys were evicted."""
        if row < len(self._length):
            length = self.restorable(row, length)
            if not length:
                self.missing.pop(row, None)
            self._tokens[row] = self._tokens.get(row, [])[:length]
            super().truncate(row, length)

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves."""
        length = min(length, self.length(row))
        return length if length == self.length(row) or not self.missing.get(row) else 0
