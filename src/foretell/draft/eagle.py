"""Drafting with EAGLE: from the target's hidden states up to the root, and from the layer's own outputs below it."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.noise import LevelNoise
from foretell.core.tree import TokenTree, TreeBounds, TreeSizes
from foretell.draft.base import Frontier, NodeLogits, TopTokens, top_tokens
from foretell.draft.cached_states import CachedStatesPredictor, Roots, Tokens, layout_of
from foretell.draft.target_states import TargetStates
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import DynamicTrees
from foretell.model.run.mtp import MTPLayer
from foretell.speculator.network.eagle import EagleNetwork


def store_states(
    network: EagleNetwork | MTPLayer, token: Int[np.ndarray, " t"], states: TargetStates, layout: Layout, cache: KVCache
) -> None:
    """Read positions whose outputs nothing reads."""
    tokens = torch.from_numpy(token)
    if network.native is None:
        network.forward_target_states(tokens, *states, layout, cache)
    else:
        hidden_states = [state.float() for state in states.hidden_states]
        network.native.store_from_target(tokens, hidden_states, states.place, layout, cache)


class EagleDrafter(CachedStatesPredictor):
    """EAGLE's layers with their own cache (EAGLE, arXiv 2401.15077, 2406.16858, 2503.01840).

    Keys of positions that the target has read are computed from its hidden states and stay in the cache. Keys of
    drafted nodes are computed from the layer's own outputs and are overwritten in the next step.
    """

    label = "one layer in the target's feature space"

    def __init__(self, network: EagleNetwork | MTPLayer, max_pending: int = 32, window: int | None = None) -> None:
        super().__init__(network, max_pending, window)
        self.network = network
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._nodes = _DraftedNodes(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @torch.inference_mode()
    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier; the first call reads the pending positions, too."""
        out, logit_index = self._outputs(tree, frontier, context)
        return self.network.to_target_vocab(self.network.compute_logits(self.network.head_input(out))), logit_index

    @torch.inference_mode()
    def top_tokens(
        self, tree: TokenTree, frontier: Frontier, context: Context, count: int, noise: LevelNoise | None = None
    ) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        out, logit_index = self._outputs(tree, frontier, context)
        states = self.network.head_input(out)
        if noise is not None:
            return top_tokens(self.network.compute_logits(states), logit_index, count, self._token_of, noise)
        best = self.network.top_tokens(states, min(count, self.network.outputs))
        return TopTokens.of(*best, logit_index, self._token_of)

    def grow_dynamic_tree(self, context: Context, sizes: TreeSizes, bounds: TreeBounds) -> TokenTree | None:
        """Dynamic trees in one call of the CPU kernels, where these run the network."""
        native = self.network.native is not None
        return self._grow(context, sizes, bounds, sizes[0] * sizes[1]) if native else None

    def _grow_native(
        self, token: Tokens, root: Roots, states: TargetStates, counts: Sequence[int], trees: DynamicTrees
    ) -> None:
        assert self.network.native is not None
        self.network.native.grow_dynamic_trees(token, *states, counts, trees, self._cache)

    def _outputs(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Outputs of the layers at the frontier."""
        if tree.nodes == 1:
            batch_row = np.flatnonzero(context.max_depth)
            node = np.zeros_like(batch_row)
            out = self._forward_roots(batch_row.tolist(), context)
            length = [self._prefixes[row].count if row in self._prefixes else 0 for row in context.rows]
            self._nodes = _DraftedNodes(np.array(context.rows), np.array(length))
            self._nodes.begin(batch_row, out)
        else:
            i, j = np.nonzero(tree.valid[np.arange(tree.rows)[:, None], frontier] & (context.max_depth > 0)[:, None])
            batch_row, node = i, frontier[i, j]
            out = self._forward_nodes(tree, batch_row, node)
        logit_index = np.full(tree.token.shape, -1, np.int64)
        logit_index[batch_row, node] = np.arange(len(batch_row))
        return out, logit_index

    def _forward_roots(self, active: Sequence[int], context: Context) -> Float[torch.Tensor, "a d"]:
        """Outputs at the roots of some requests, after reading the pending positions."""
        rows = [context.rows[i] for i in active]
        if not rows:
            return self._cache.k.new_zeros(0, self.network.hidden, dtype=self.network.dtype)
        counts = self._count_pending(rows, context)
        layout = self._reserve_pending(rows, counts)
        token, states = self._pending(rows, [context.sequences[i] for i in active], counts)
        read = self.network.forward_target_states(torch.from_numpy(token), *states, layout, self._cache)
        return read[-1:] if len(rows) == 1 else read[torch.tensor(list(accumulate(counts))) - 1]

    @torch.inference_mode()
    def _read_pending(self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]) -> None:
        layout = self._reserve_pending(rows, counts)
        store_states(self.network, *self._pending(rows, texts, counts), layout, self._cache)

    def _forward_nodes(
        self, tree: TokenTree, batch_row: Int[np.ndarray, " k"], node: Int[np.ndarray, " k"]
    ) -> Float[torch.Tensor, "k d"]:
        """Outputs at drafted nodes."""
        if not len(batch_row):
            return self._nodes.out[:0]
        parent, layout = self._nodes.add(tree, batch_row, node)
        self._cache.reserve(layout.row.tolist(), (layout.slot + 1).tolist())
        token = torch.from_numpy(tree.token[batch_row, node])
        out = self.network.forward_features(token, self._nodes.out, torch.from_numpy(parent), layout, self._cache)
        self._nodes.out = torch.cat((self._nodes.out, out))
        return out


class MTPDrafter(EagleDrafter):
    """The multi-token prediction layer of the target's checkpoint (DeepSeek-V3, arXiv 2412.19437), for any number of
    tokens: drafted ones are read with the layer's own outputs.
    """

    label = "the checkpoint's multi-token prediction layer"


class _DraftedNodes:
    """The nodes that the layer has read in this step, indexed in the order of reading, roots first.

    A root is the last of the `length` positions of a cache row; the keys of drafted nodes take the slots after it.
    """

    def __init__(self, row: Int[np.ndarray, " b"], length: Int[np.ndarray, " b"]) -> None:
        self.out = torch.zeros(0, 0)
        """Their outputs, [n d]."""
        self._row, self._length = row, length
        self._drafted_count = [0] * len(row)
        """Nodes below each root."""
        self._index = np.full((len(row), 1), -1)
        """Index of every node of the tree; -1: not read."""
        self._visible_slots: list[list[int]] = []
        """Slots after the prefix that each node attends to: those of its ancestors and its own."""

    def begin(self, batch_row: Int[np.ndarray, " a"], out: Float[torch.Tensor, "a d"]) -> None:
        """Add the roots of some requests."""
        self._index[batch_row, 0] = np.arange(len(batch_row))
        self._visible_slots, self.out = [[] for _ in batch_row], out

    def add(
        self, tree: TokenTree, batch_row: Int[np.ndarray, " k"], node: Int[np.ndarray, " k"]
    ) -> tuple[Int[np.ndarray, " k"], Layout]:
        """Add some nodes; returns the indices of their parents, and their layout."""
        known, length, first = self._index, self._length[batch_row], len(self._visible_slots)
        self._index = np.full((len(known), tree.nodes), -1)
        self._index[:, : known.shape[1]] = known
        parent = self._index[batch_row, tree.parent[batch_row, node]]
        self._index[batch_row, node] = np.arange(first, first + len(batch_row))
        for i, above in zip(batch_row.tolist(), parent.tolist(), strict=True):
            self._visible_slots.append([*self._visible_slots[above], int(self._length[i]) + self._drafted_count[i]])
            self._drafted_count[i] += 1
        extra = self._visible_slots[first:]
        slot = np.array([slots[-1] for slots in extra])
        depth = np.array([len(slots) for slots in extra])
        # A root is at the last position of its prefix.
        layout = layout_of(self._row[batch_row], slot, length - 1 + depth, length, extra)
        return parent, layout
