"""Drafting with EAGLE's layer: it follows the target through the text, and goes on from its own outputs below the text's end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.context import Context, Step, Text
from foretell.draft.base import Predictor, Ranked, ranked
from foretell.draft.network.eagle import EagleNetwork
from foretell.draft.network.layer import Sight
from foretell.model.cache import Cache
from foretell.tree import TokenTree


@dataclass
class _Row:
    """What is known of a text: how many positions the layer has read, and the target's states at those after them, side by side."""

    length: int = 0
    waiting: list[Float[torch.Tensor, "n kd"]] = field(default_factory=list)

    @property
    def behind(self) -> int:
        """Positions to be read."""
        return sum(map(len, self.waiting))

    def take(self, count: int) -> Float[torch.Tensor, "n kd"]:
        """The states of the next `count` positions, which count as read from now on."""
        states = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
        self.waiting = [states[count:]] if count < len(states) else []
        self.length += count
        return states[:count]


class _Slots(Sight):
    """New keys go to consecutive slots of each cache row, from `first` on; queries see the slots that `mask` marks."""

    def __init__(
        self, cache: Cache, rows: Sequence[int], first: Sequence[int], mask: Bool[np.ndarray, "b n s"]
    ) -> None:
        self._cache, self._rows, self._first = cache, rows, first
        self._mask = torch.from_numpy(mask).to(cache.k.device)
        self._wide: torch.Tensor | None = None

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "b n h e"],
        k: Float[torch.Tensor, "b n g e"],
        v: Float[torch.Tensor, "b n g e"],
    ) -> Float[torch.Tensor, "b n he"]:
        """Attention over the cache; query heads of a group are folded into the query axis, so that keys are read once."""
        b, n, h, e = q.shape
        g, s = k.shape[2], self._mask.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        for i, (row, first) in enumerate(zip(self._rows, self._first, strict=True)):
            self._cache.k[layer, row, :, first : first + n] = k[i]
            self._cache.v[layer, row, :, first : first + n] = v[i]
        past_k, past_v = (self._of_rows(part[layer])[:, :, :s] for part in (self._cache.k, self._cache.v))
        folded = q.transpose(1, 2).reshape(b, g, h // g * n, e)
        out = F.scaled_dot_product_attention(folded, past_k, past_v, attn_mask=self._folded(h // g))
        return out.view(b, h, n, e).transpose(1, 2).reshape(b, n, h * e)

    def _folded(self, groups: int) -> Bool[torch.Tensor, "b 1 m s"]:
        """The mask for that many query heads under one another, made once for all layers."""
        if self._wide is None:
            self._wide = self._mask.repeat(1, groups, 1)[:, None]
        return self._wide

    def _of_rows(self, part: Float[torch.Tensor, "r g s e"]) -> Float[torch.Tensor, "b g s e"]:
        if len(self._rows) == 1:
            return part[self._rows[0] : self._rows[0] + 1]
        return part[list(self._rows)]


class Eagle(Predictor):
    """A layer with a cache of its own, on the target's states (EAGLE, arXiv 2401.15077, 2406.16858, 2503.01840).

    The keys of positions that the target has read were made from its states and stay. Those of drafted nodes were made from the layer's own outputs,
    stand behind them for the length of a step, and are forgotten. Positions that a long pass of the target read are caught up with at once if there
    are more than `most`; the others wait for the next draft, whose first call reads them with the root.
    """

    def __init__(self, network: EagleNetwork, most: int = 32) -> None:
        self.network, self.taps, self.reach = network, network.taps, network.context
        self._most = most
        c, device = network.config, network.get_buffer("_cos").device
        self._cache = Cache(c.layers, c.kv_heads, c.head_dim, network.dtype, device)
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._known: dict[int, _Row] = {}
        self._branches = _Branches(0, torch.zeros(0, 1, 0), np.zeros((0, 1), np.int64))

    def depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """None for texts that the target has not read up to their last token."""
        pairs = zip(context.rows, context.texts, strict=True)
        ready = [self._reach(self._known.get(row)) == text.length - 1 > 0 for row, text in pairs]
        return np.where(ready, super().depths(context), 0)

    @staticmethod
    def _reach(row: _Row | None) -> int:
        return -1 if row is None else row.length + row.behind

    @torch.inference_mode()
    def keep(self, step: Step) -> None:
        """Remember the target's states at the kept nodes."""
        states = torch.cat(step.output.features, -1)
        for i, (row, text) in enumerate(zip(step.context.rows, step.context.texts, strict=True)):
            known = self._known.setdefault(row, _Row())
            places = step.output.feature_at[i, list(step.paths[i])][: text.length - 1 - self._reach(known)]
            known.waiting.append(states[torch.from_numpy(places).to(states.device)])
            if known.behind > self._most:
                self._read([row], [text], [known.behind - 1])

    def clear(self, row: int) -> None:
        """Forget a row: its request is over."""
        self._known.pop(row, None)

    @torch.inference_mode()
    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores after the frontier; the first call reads what the target has read since the last one."""
        logits, at = self._scores(tree, frontier, context)
        return self.network.spread(logits), at

    @torch.inference_mode()
    def best(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> Ranked:
        """The same, without a look at the tokens that it does not draft."""
        logits, at = self._scores(tree, frontier, context)
        return ranked(logits, at, count, self._token_of)

    def _scores(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b n"]]:
        out = self._root(tree, context) if tree.nodes == 1 else self._level(tree, frontier, context)
        b, f = frontier.shape
        at = np.full(tree.token.shape, -1, np.int64)
        row = np.arange(b)[:, None]
        at[row, frontier] = np.where(tree.live[row, frontier], np.arange(b * f).reshape(b, f), -1)
        at[context.room == 0] = -1
        return self.network.score(self.network.see(out.flatten(0, 1))), at

    def _root(self, tree: TokenTree, context: Context) -> Float[torch.Tensor, "b 1 d"]:
        """Outputs at the roots, after reading what waits; zeros for texts that cannot be drafted for."""
        able = np.flatnonzero(context.room).tolist()
        rows = [context.rows[i] for i in able]
        counts = [self._known[row].behind for row in rows]
        out = self._cache.k.new_zeros(tree.rows, 1, self.network.card.hidden)
        if rows:
            read = self._read(rows, [context.texts[i] for i in able], counts)
            out[able, 0] = read[range(len(rows)), [n - 1 for n in counts]]
        length = [self._known[row].length if row in self._known else 0 for row in context.rows]
        self._branches = _Branches(tree.rows, out, np.array(length)[:, None])
        return out

    def _read(self, rows: Sequence[int], texts: Sequence[Text], counts: Sequence[int]) -> Float[torch.Tensor, "b n d"]:
        """Read the next positions of some rows with the target's states, to stay."""
        n, first = max(counts), [self._known[row].length for row in rows]
        self._cache.reserve(max(rows) + 1, max(first) + n)
        token = np.zeros((len(rows), n), np.int64)
        states = list[torch.Tensor]()
        for i, (row, text, count) in enumerate(zip(rows, texts, counts, strict=True)):
            token[i, :count] = text.tokens[first[i] + 1 : first[i] + 1 + count]
            states.append(F.pad(self._known[row].take(count), (0, 0, 0, n - count)))
        position = np.array(first)[:, None] + np.arange(n)
        mask = np.arange(max(first) + n) <= position[:, :, None]
        g = self.network.fuse(torch.stack(states).to(self._cache.k.device, self.network.dtype))
        return self._advance(token, g, position, _Slots(self._cache, rows, first, mask))

    def _level(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> Float[torch.Tensor, "b f d"]:
        """Outputs at drafted nodes."""
        row = np.arange(tree.rows)[:, None]
        branches = self._branches
        parent = branches.add(tree.nodes, frontier, tree.parent[row, frontier])
        first, position, mask = branches.sight(frontier.shape[1])
        self._cache.reserve(max(context.rows) + 1, mask.shape[2])
        sight = _Slots(self._cache, context.rows, first, mask)
        out = self._advance(tree.token[row, frontier], branches.states(parent), position, sight)
        branches.out = torch.cat((branches.out, out), 1)
        return out

    def _advance(
        self,
        token: Int[np.ndarray, "b n"],
        g: Float[torch.Tensor, "b n d"],
        position: Int[np.ndarray, "b n"],
        sight: Sight,
    ) -> Float[torch.Tensor, "b n d"]:
        device = g.device
        return self.network.advance(torch.from_numpy(token).to(device), g, torch.from_numpy(position).to(device), sight)


class _Branches:
    """The drafted nodes that the layer has read in this step, in the order in which it did; number 0 is the root, the last position of the text.

    Number `p` from 1 on has its keys in slot `length + p - 1`.
    """

    def __init__(self, rows: int, out: Float[torch.Tensor, "b 1 d"], length: Int[np.ndarray, "b 1"]) -> None:
        self.out, self._length = out, length
        self._number = np.zeros((rows, 1), np.int64)
        """Of every node of the tree."""
        self._depth = np.zeros((rows, 1), np.int64)
        self._sees = np.ones((rows, 1, 1), bool)
        """Whether one number sees another: its ancestors and itself."""

    def add(
        self, nodes: int, frontier: Int[np.ndarray, "b f"], parent: Int[np.ndarray, "b f"]
    ) -> Int[np.ndarray, "b f"]:
        """Number the nodes of a frontier, in a tree of `nodes`; their parents' numbers."""
        b, f = frontier.shape
        have = self._sees.shape[1]
        row = np.arange(b)[:, None]
        above = self._number[row, parent]
        grown = np.zeros((b, nodes), np.int64)
        grown[:, : self._number.shape[1]] = self._number
        grown[row, frontier] = np.arange(have, have + f)
        sees = np.zeros((b, have + f, have + f), bool)
        sees[:, :have, :have] = self._sees
        sees[:, have:, :have] = self._sees[row, above]
        sees[:, np.arange(have, have + f), np.arange(have, have + f)] = True
        self._number, self._sees = grown, sees
        self._depth = np.concatenate((self._depth, self._depth[row, above] + 1), 1)
        return above

    def sight(self, f: int) -> tuple[list[int], Int[np.ndarray, "b f"], Bool[np.ndarray, "b f s"]]:
        """Of the `f` nodes added last: the first one's slot per row, their rotary positions, and the slots that they see."""
        count = self._sees.shape[1]
        first = (self._length[:, 0] + count - f - 1).tolist()
        slots = int(self._length.max()) + count - 1
        mask = np.broadcast_to(np.arange(slots) < self._length[:, :, None], (len(first), f, slots)).copy()
        for i, length in enumerate(self._length[:, 0].tolist()):
            mask[i, :, length : length + count - 1] = self._sees[i, -f:, 1:]
        return first, self._length - 1 + self._depth[:, -f:], mask

    def states(self, number: Int[np.ndarray, "b f"]) -> Float[torch.Tensor, "b f d"]:
        """Outputs at these numbers."""
        where = torch.from_numpy(number + np.arange(len(number))[:, None] * self.out.shape[1])
        return self.out.flatten(0, 1)[where.to(self.out.device)]
