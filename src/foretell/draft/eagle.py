"""Drafting with EAGLE's layer: it follows the target through the text, and goes on from its own outputs below the
text's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.tree import TokenTree, tree_from_parents
from foretell.draft.base import Predictor, TopTokens
from foretell.model.cache import KVCache, Layout
from foretell.model.kernels import Trees
from foretell.speculator.network.eagle import EagleNetwork


class _States(NamedTuple):
    """The target's states at some positions: where they are among those of a whole pass, which are not copied before
    they are read.
    """

    hidden_states: tuple[Float[torch.Tensor, "n d"], ...]
    place: Int[np.ndarray, " t"]


def _together(parts: Sequence[_States]) -> _States:
    """The same in one."""
    if len(parts) == 1:
        return parts[0]
    gathered = [
        [hidden_states[torch.from_numpy(p.place).to(hidden_states.device)] for hidden_states in p.hidden_states]
        for p in parts
    ]
    return _States(tuple(map(torch.cat, zip(*gathered, strict=True))), np.arange(sum(len(p.place) for p in parts)))


@dataclass
class _Row:
    """What is known of a text: how many positions the layer has read, and the target's states at those after them."""

    length: int = 0
    waiting: _States | None = None

    @property
    def behind(self) -> int:
        """Positions to be read."""
        return 0 if self.waiting is None else len(self.waiting.place)

    def add(self, states: _States) -> None:
        """Have further positions wait.

        Where others do already their states are copied, so that no more than one pass is held.
        """
        self.waiting = states if self.waiting is None else _together([self.waiting, states])

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        count = length - self.length
        if self.waiting is not None:
            self.waiting = _States(self.waiting.hidden_states, self.waiting.place[:count]) if count > 0 else None
        self.length = min(self.length, length)

    def take(self, count: int) -> _States:
        """The states of the next `count` positions, which count as read from now on."""
        assert self.waiting is not None
        hidden_states, place = self.waiting
        self.waiting = _States(hidden_states, place[count:]) if count < len(place) else None
        self.length += count
        return _States(hidden_states, place[:count])


class EagleDrafter(Predictor):
    """A layer with a cache of its own, on the target's states (EAGLE, arXiv 2401.15077, 2406.16858, 2503.01840).

    The keys of positions that the target has read were made from its states and stay. Those of drafted nodes were made
    from the layer's own outputs, stand behind them for the length of a step, and are forgotten. Positions that a long
    pass of the target read are caught up with at once if there are more than `most`; the others wait for the next
    draft, whose first call reads them with the root.
    """

    label = "one layer in the target's feature space"

    def __init__(self, network: EagleNetwork, max_pending: int = 32) -> None:
        self.network, self.hidden_layers, self.max_context = network, network.hidden_layers, network.context
        self._most = max(max_pending, 1)
        c, device = network.config, network.get_buffer("_cos").device
        self._cache = KVCache(c.layers, c.kv_heads, c.head_dim, network.cache_dtype, device)
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._known: dict[int, _Row] = {}
        self._proposed: dict[int, _Row] = {}
        """Rows that were proposed for in this step, as they were before: a step that failed proposes again."""
        self._branches = _Branches(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """None for texts that the target has not read up to their last token, and none before the first new token.

        The target has read a prompt up to its last token only if that was left for a chunk of its own: drafting then
        would make drawn answers depend on how the prompt was cut.
        """
        pairs = zip(context.rows, context.sequences, strict=True)
        ready = [
            len(text.generated) > 0 and self._reach(self._known.get(row)) == text.length - 1 for row, text in pairs
        ]
        return np.where(ready, super().max_depths(context), 0)

    @staticmethod
    def _reach(row: _Row | None) -> int:
        return -1 if row is None else row.length + row.behind

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        """Remember the target's states at the kept nodes."""
        self._proposed = {}
        for i, (row, text) in enumerate(zip(step.context.rows, step.context.sequences, strict=True)):
            known = self._known.setdefault(row, _Row())
            if self._reach(known) != step.starts[i] or text.length > self.max_context:
                # It has not seen how the text began, or the text is longer than it can read.
                self.release(row)
                continue
            places = step.output.hidden_index[i, list(step.paths[i])][: text.length - 1 - self._reach(known)]
            known.add(_States(step.output.hidden_states, places))
            if known.behind > self._most:
                self._read([row], [text], [known.behind - 1])

    def release(self, row: int) -> None:
        """Forget a row: its request is over."""
        self._known.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Keep the positions of the common tokens, if all are known."""
        known = self._known.get(row)
        if known is None or not 0 < length <= self._reach(known):
            self.release(row)
            return 0
        known.cut(length)
        return length

    @torch.inference_mode()
    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores after the frontier; the first call reads what the target has read since the last one."""
        out, at = self._outputs(tree, frontier, context)
        return self.network.to_target_vocab(self.network.compute_logits(self.network.head_input(out))), at

    @torch.inference_mode()
    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The same, without a look at the tokens that it does not draft."""
        out, at = self._outputs(tree, frontier, context)
        best = self.network.top_tokens(self.network.head_input(out), min(count, len(self.network.lm_head)))
        return TopTokens.of(*best, at, self._token_of)

    @torch.inference_mode()
    def grow_dynamic_tree(
        self, context: Context, sizes: tuple[int, int, int], bounds: tuple[float, float]
    ) -> TokenTree | None:
        """Whole trees from the CPU kernels, where these run the network."""
        able = np.flatnonzero(context.max_depth)
        if self.network.native is None or not len(able):
            return None
        out = self._roots(able.tolist(), context)
        row = np.array(context.rows)[able]
        length = np.array([self._known[r].length for r in row.tolist()])
        self._cache.reserve(int(row.max()) + 1, int(length.max()) + sizes[0] * sizes[1])
        trees = Trees(context.max_depth[able], sizes, bounds, row, length)
        self.network.native.beam(out, trees, self._cache)
        return tree_from_parents(context.last_tokens, able, trees.token, trees.parent, trees.count)

    def _outputs(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k d"], Int[np.ndarray, "b n"]]:
        """What the layer makes of the frontier."""
        if tree.nodes == 1:
            text = np.flatnonzero(context.max_depth)
            node = np.zeros_like(text)
            out = self._roots(text.tolist(), context)
            length = [self._known[row].length if row in self._known else 0 for row in context.rows]
            self._branches = _Branches(np.array(context.rows), np.array(length))
            self._branches.begin(text, out)
        else:
            i, j = np.nonzero(tree.valid[np.arange(tree.rows)[:, None], frontier] & (context.max_depth > 0)[:, None])
            text, node = i, frontier[i, j]
            out = self._level(tree, text, node)
        at = np.full(tree.token.shape, -1, np.int64)
        at[text, node] = np.arange(len(text))
        return out, at

    def _roots(self, able: Sequence[int], context: Context) -> Float[torch.Tensor, "a d"]:
        """Outputs at the roots of some texts, after reading what waits."""
        rows = [context.rows[i] for i in able]
        if not rows:
            return self._cache.k.new_zeros(0, self.network.target_info.hidden, dtype=self.network.dtype)
        for row in rows:
            self._known[row] = replace(self._proposed.setdefault(row, replace(self._known[row])))
        counts = [self._known[row].behind for row in rows]
        read = self._read(rows, [context.sequences[i] for i in able], counts)
        return read[-1:] if len(rows) == 1 else read[torch.tensor(list(accumulate(counts))) - 1]

    def _read(
        self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]
    ) -> Float[torch.Tensor, "t d"]:
        """Read the next positions of some rows with the target's states, to stay."""
        first = [self._known[row].length for row in rows]
        self._cache.reserve(max(rows) + 1, max(f + n for f, n in zip(first, counts, strict=True)))
        slot = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        token = np.concatenate([t.tokens[f + 1 : f + 1 + n] for t, f, n in zip(texts, first, counts, strict=True)])
        states = _together([self._known[row].take(count) for row, count in zip(rows, counts, strict=True)])
        layout = _layout(np.repeat(rows, counts), slot, slot, slot + 1, [])
        return self.network.forward_target_states(torch.from_numpy(token), *states, layout, self._cache)

    def _level(
        self, tree: TokenTree, text: Int[np.ndarray, " k"], node: Int[np.ndarray, " k"]
    ) -> Float[torch.Tensor, "k d"]:
        """Outputs at drafted nodes."""
        if not len(text):
            return self._branches.out[:0]
        parent, layout = self._branches.add(tree, text, node)
        self._cache.reserve(int(layout.row.max()) + 1, int(layout.slot.max()) + 1)
        token = torch.from_numpy(tree.token[text, node])
        out = self.network.forward_features(token, self._branches.out, torch.from_numpy(parent), layout, self._cache)
        self._branches.out = torch.cat((self._branches.out, out))
        return out


class _Branches:
    """The nodes that the layer has read in this step, numbered in the order in which it did, roots first.

    Roots are the last positions of texts that hold `length` positions; the keys of drafted nodes go to the slots behind
    these.
    """

    def __init__(self, row: Int[np.ndarray, " b"], length: Int[np.ndarray, " b"]) -> None:
        self.out = torch.zeros(0, 0)
        """Their outputs, [n d]."""
        self._row, self._length = row, length
        self._drafted = [0] * len(row)
        """Nodes below each root."""
        self._number = np.full((len(row), 1), -1)
        """Of every node of the tree; -1: not read."""
        self._sees: list[list[int]] = []
        """Slots behind the text that each number sees: its ancestors' and its own."""

    def begin(self, able: Int[np.ndarray, " a"], out: Float[torch.Tensor, "a d"]) -> None:
        """Number the roots of some texts."""
        self._number[able, 0] = np.arange(len(able))
        self._sees, self.out = [[] for _ in able], out

    def add(
        self, tree: TokenTree, text: Int[np.ndarray, " k"], node: Int[np.ndarray, " k"]
    ) -> tuple[Int[np.ndarray, " k"], Layout]:
        """Number some nodes; their parents' numbers, and where they stand."""
        known, length = self._number, self._length[text]
        self._number = np.full((len(known), tree.nodes), -1)
        self._number[:, : known.shape[1]] = known
        parent = self._number[text, tree.parent[text, node]]
        self._number[text, node] = np.arange(len(self._sees), len(self._sees) + len(text))
        for i, above in zip(text.tolist(), parent.tolist(), strict=True):
            self._sees.append([*self._sees[above], int(self._length[i]) + self._drafted[i]])
            self._drafted[i] += 1
        extra = self._sees[-len(text) :]
        slot = np.array([slots[-1] for slots in extra])
        depth = np.array([len(slots) for slots in extra])
        # A root stands at the last position that its text holds.
        layout = _layout(self._row[text], slot, length - 1 + depth, length, extra)
        return parent, layout


def _layout(
    row: Int[np.ndarray, " t"],
    slot: Int[np.ndarray, " t"],
    position: Int[np.ndarray, " t"],
    prefix: Int[np.ndarray, " t"],
    extra: Sequence[Sequence[int]],
) -> Layout:
    """A layout from plain numbers; without `extra` no token sees anything beyond its prefix."""
    seen = np.full((len(row), max(map(len, extra), default=0)), -1, np.int32)
    for i, slots in enumerate(extra):
        seen[i, : len(slots)] = slots
    parts = [np.asarray(part, np.int32) for part in (row, slot, position, prefix)]
    return Layout(*(torch.from_numpy(part) for part in (*parts, seen)))
