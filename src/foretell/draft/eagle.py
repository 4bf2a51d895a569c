"""Drafting with EAGLE: from the target's hidden states up to the root, and from the layer's own outputs below it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.noise import noise_for_kernels
from foretell.core.tree import TokenTree, tree_from_scores
from foretell.draft.base import Predictor, TopTokens
from foretell.draft.target_states import ObservedStep, PrefixState, TargetStates, concatenate_states
from foretell.model.kernels import DynamicTrees
from foretell.model.layout import Layout
from foretell.model.mtp import MTPLayer
from foretell.speculator.network.eagle import EagleNetwork

_READ_AGAIN = 16
"""Tokens of a known prefix that the target reads again for a request whose prefix the drafter has not observed, if it
drafts at present. SmolLM2's EAGLE-3 gave 2.24, 2.42, 2.56 and 2.62 tokens per pass with 1, 8, 64 and all 106 tokens of
the prompt (96 new tokens).
"""
_HELD_STEPS = 32
"""Last steps that are held while the method does not draft; what came before is left out when it drafts again."""


class EagleDrafter(Predictor):
    """EAGLE's layers with their own cache (EAGLE, arXiv 2401.15077, 2406.16858, 2503.01840).

    Keys of positions that the target has read are computed from its hidden states and stay in the cache. Keys of
    drafted nodes are computed from the layer's own outputs and are overwritten in the next step. Up to `max_pending`
    positions that the target has read are pending until the next draft, whose first call reads them with the root; more
    of them are read at once, those of all requests together.

    It may begin anywhere in a sequence: what lies before is not attended to. So a request need not read the prefix of
    its prompt again that other requests have read, and steps in which the method does not draft cost nothing.
    """

    label = "one layer in the target's feature space"
    resumes = True

    def __init__(self, network: EagleNetwork | MTPLayer, max_pending: int = 32) -> None:
        self.network, self.hidden_layers, self.max_context = network, network.hidden_layers, network.context
        self._max_pending = max(max_pending, 1)
        self._cache = network.new_cache(network.device)
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._prefixes: dict[int, PrefixState] = {}
        self._proposed: dict[int, tuple[int, list[TargetStates]]] = {}
        """Length and pending states of each row before this step's proposal: a step that fails proposes again."""
        self._held = deque[ObservedStep](maxlen=_HELD_STEPS)
        """Steps without drafting."""
        self._released: dict[int, int] = {}
        """How many of the held steps do not count for a row: it was released, or they were taken in."""
        self._waits = False
        """Whether the last step was one of these."""
        self._nodes = _DraftedNodes(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """0 for sequences that the target has not read up to their last token, and before the first new token: whether
        the target has read a prompt up to its last token depends on its chunks, and sampled answers must not.
        """
        self._add_held()
        depths = super().max_depths(context)
        for i, (row, text) in enumerate(zip(context.rows, context.sequences, strict=True)):
            known = self._prefixes.get(row)
            if text.length == text.prompt_length or known is None or known.end != text.length - 1:
                depths[i] = 0
        return depths

    def observe(self, step: StepResult) -> None:
        """Keep the target's states at the accepted nodes."""
        self._proposed, self._waits = {}, not step.drafting
        if self._waits:
            if len(self._held) == _HELD_STEPS:
                self._released = {row: count - 1 for row, count in self._released.items() if count > 1}
            self._held.append(ObservedStep.of(step))
            return
        self._add_held()
        observed = ObservedStep.of(step)
        for i in range(len(observed.rows)):
            self._add(observed, i)
        long = [
            (row, text)
            for row, text in zip(step.context.rows, step.context.sequences, strict=True)
            if row in self._prefixes and self._prefixes[row].pending_count > self._max_pending
        ]
        if long:
            rows = [row for row, _ in long]
            counts = [self._prefixes[row].pending_count - 1 for row in rows]
            self._forward_target_states(rows, [text for _, text in long], counts)

    def _add_held(self) -> None:
        """Take in the steps without drafting."""
        if self._held:
            for row in {row for step in self._held for row in step.rows}:
                self._add_held_row(row)
            self._held.clear()
            self._released.clear()

    def _add_held_row(self, row: int) -> None:
        """Take in what they have of one row."""
        first = self._released.get(row, 0)
        for step in list(self._held)[first:]:
            if row in step.rows:
                self._add(step, step.rows.index(row))
        if self._held:
            self._released[row] = len(self._held)
        known = self._prefixes.get(row)
        if known is not None and len(known.pending) > 2 * _HELD_STEPS:  # they hold the states of whole passes
            self._forget(row)
            self._prefixes[row] = known.latest(_HELD_STEPS)

    def _add(self, step: ObservedStep, i: int) -> None:
        """Add the states of request `i` of a step to those that are pending."""
        row, start = step.rows[i], step.starts[i]
        known = self._prefixes.get(row)
        if known is None or known.end != start or step.lengths[i] > self.max_context:
            self._forget(row)
            if step.lengths[i] > self.max_context:
                return
            known = self._prefixes[row] = PrefixState(start)
        places = step.hidden_index[i, list(step.paths[i])][: step.lengths[i] - 1 - start]
        if len(places):
            known.pending.append(TargetStates(step.hidden_states, places))

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        if self._held:
            self._released[row] = len(self._held)
        self._forget(row)

    def _forget(self, row: int) -> None:
        self._prefixes.pop(row, None)
        self._cache.truncate(row, 0)

    def rewind(self, row: int, length: int) -> int:
        """Keep the positions of the shared tokens, if all from some position on are known; otherwise begin near their
        end.
        """
        self._add_held_row(row)
        known = self._prefixes.get(row)
        if known is None or not known.start <= length <= known.end:
            return self._begin_near(row, length)
        known.truncate(length)
        self._cache.truncate(row, known.length)
        return length

    def _begin_near(self, row: int, length: int) -> int:
        """Forget a row, and let the target read the last tokens of a prefix again."""
        self.release(row)
        start = length if self._waits else max(0, length - _READ_AGAIN)
        self._prefixes[row] = PrefixState(start)
        return start

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the positions of the shared tokens, if all from some position on are known; otherwise begin near their
        end.
        """
        self._add_held_row(source)
        self.release(target)
        known = self._prefixes.get(source)
        if known is None or not known.start <= length <= known.end:
            return self._begin_near(target, length)
        copied = self._prefixes[target] = replace(known)
        copied.truncate(length)
        if copied.length:
            self._cache.copy_row(source, target, copied.length)
        return length

    @torch.inference_mode()
    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Logits after the frontier; the first call reads the pending positions, too."""
        out, logit_index = self._outputs(tree, frontier, context)
        return self.network.to_target_vocab(self.network.compute_logits(self.network.head_input(out))), logit_index

    @torch.inference_mode()
    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        out, logit_index = self._outputs(tree, frontier, context)
        best = self.network.top_tokens(self.network.head_input(out), min(count, self.network.outputs))
        return TopTokens.of(*best, logit_index, self._token_of)

    def grow_dynamic_tree(
        self, context: Context, sizes: tuple[int, int, int], bounds: tuple[float, float]
    ) -> TokenTree | None:
        """DynamicTrees in one call of the CPU kernels, where these run the network."""
        active = np.flatnonzero(context.max_depth)
        if self.network.native is None or not len(active):
            return None
        which = active.tolist()
        rows = [context.rows[i] for i in which]
        self._restore(rows)
        counts = [self._prefixes[row].pending_count for row in rows]
        token, states = self._take_pending(rows, [context.sequences[i] for i in which], counts)
        length = [self._prefixes[row].length for row in rows]
        self._cache.reserve(rows, [n + sizes[0] * sizes[1] for n in length])
        noise = noise_for_kernels(context.select(which), sizes[0])
        trees = DynamicTrees(context.max_depth[active], sizes, bounds, rows, length, noise)
        hidden_states = [h if h.dtype == torch.float32 else h.float() for h in states.hidden_states]
        self.network.native.grow_dynamic_trees(token, hidden_states, states.place, counts, trees, self._cache)
        return tree_from_scores(context.last_tokens, which, trees.token, trees.parent, trees.score, trees.count)

    def _outputs(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k d"], Int[np.ndarray, "b n"]]:
        """Outputs of the layers at the frontier."""
        if tree.nodes == 1:
            batch_row = np.flatnonzero(context.max_depth)
            node = np.zeros_like(batch_row)
            out = self._forward_roots(batch_row.tolist(), context)
            length = [self._prefixes[row].length if row in self._prefixes else 0 for row in context.rows]
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
        self._restore(rows)
        counts = [self._prefixes[row].pending_count for row in rows]
        read = self._forward_target_states(rows, [context.sequences[i] for i in active], counts)
        return read[-1:] if len(rows) == 1 else read[torch.tensor(list(accumulate(counts))) - 1]

    def _restore(self, rows: Sequence[int]) -> None:
        """Take rows back to their state before this step's proposal."""
        for row in rows:
            prefix = self._prefixes[row]
            prefix.length, prefix.pending = self._proposed.setdefault(row, (prefix.length, prefix.pending))

    def _take_pending(
        self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]
    ) -> tuple[Int[np.ndarray, " t"], TargetStates]:
        """The tokens and the target's states of the next positions of some rows, which count as read."""
        first = [self._prefixes[row].start + self._prefixes[row].length for row in rows]
        token = [t.tokens[f + 1 : f + 1 + n] for t, f, n in zip(texts, first, counts, strict=True)]
        states = concatenate_states([self._prefixes[row].take(count) for row, count in zip(rows, counts, strict=True)])
        return token[0] if len(token) == 1 else np.concatenate(token), states

    @torch.inference_mode()
    def _forward_target_states(
        self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]
    ) -> Float[torch.Tensor, "t d"]:
        """Read the next positions of some rows from the target's states."""
        first = [self._prefixes[row].length for row in rows]
        self._cache.reserve(rows, [f + n for f, n in zip(first, counts, strict=True)])
        slot = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        token, states = self._take_pending(rows, texts, counts)
        layout = _layout(np.repeat(rows, counts), slot, slot, slot + 1, [])
        return self.network.forward_target_states(torch.from_numpy(token), *states, layout, self._cache)

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
        layout = _layout(self._row[batch_row], slot, length - 1 + depth, length, extra)
        return parent, layout


def _layout(
    row: Int[np.ndarray, " t"],
    slot: Int[np.ndarray, " t"],
    position: Int[np.ndarray, " t"],
    prefix: Int[np.ndarray, " t"],
    extra: Sequence[Sequence[int]],
) -> Layout:
    """A layout from arrays; without `extra` tokens attend to their prefix only."""
    seen = np.full((len(row), max(map(len, extra), default=0)), -1, np.int32)
    for i, slots in enumerate(extra):
        seen[i, : len(slots)] = slots
    parts = [np.asarray(part, np.int32) for part in (row, slot, position, prefix)]
    return Layout(*(torch.from_numpy(part) for part in (*parts, seen)))
