"""The token tree: several drafted continuations of one text, sharing their prefixes, read by the target in a single pass.

The structure (tokens, parents, flags) is host data and lives in numpy; distributions are device data and live in torch. Batched: row `i` of every
array belongs to the `i`-th text of the step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens of `b` texts, `n` nodes each.

    Nodes `0 .. trunk-1` of a row are tokens already decided but not yet read by the target (a prompt chunk, or just the last token):
    a chain whose end is the *root* of the drafts. Every other node is a guess; `parent[i] < i` always. Worked example, trunk 1::

        index   0     1     2     3         the ──┬─ cat ── sat
        token   the   cat   dog   sat             └─ dog
        parent  -1    0     0     1
        depth   0     1     1     2
    """

    token: Int[np.ndarray, "b n"]
    parent: Int[np.ndarray, "b n"]
    live: Bool[np.ndarray, "b n"]
    """False: padding or a probe; such a node is never accepted."""
    probe: Bool[np.ndarray, "b n"]
    """True: read by the target for the drafter's own sake."""
    drawn_from: Int[np.ndarray, "b n"]
    """Row of `q` that the node was sampled from; -1: picked deterministically, so its distribution is a point mass."""
    trunk: Int[np.ndarray, " b"]
    distinct: Bool[np.ndarray, " b"]
    """Whether the drawn siblings of a text were drawn without replacement."""
    q: Float[torch.Tensor, "b m v"] | None = None
    """Distributions the drawn nodes were sampled from, after temperature, truncation and penalties."""
    silent: Bool[np.ndarray, "b n"] | None = None
    """Probes whose scores nobody needs; None: there are none."""
    inputs: Float[torch.Tensor, "e d"] | None = None
    """What the first block sees for the token ids from the vocabulary's size on, which probes may carry; None: all ids are tokens."""

    @property
    def rows(self) -> int:
        """Number of texts."""
        return len(self.token)

    @property
    def nodes(self) -> int:
        """Number of nodes per text, padding included."""
        return int(self.token.shape[1])

    @property
    def caught_up(self) -> bool:
        """Whether every trunk is the last token alone: the target has read all that came before."""
        return set(self.trunk.tolist()) == {1}

    @cached_property
    def read(self) -> Bool[np.ndarray, "b n"]:
        """Nodes that the target reads."""
        return self.live | self.probe

    @cached_property
    def scored(self) -> Bool[np.ndarray, "b n"]:
        """Nodes whose scores somebody may need."""
        return self.read if self.silent is None else self.read & ~self.silent

    @cached_property
    def depth(self) -> Int[np.ndarray, "b n"]:
        """Distance of every node from node 0; of padding, 0."""
        rows = list[list[int]]()
        for parents in self.parent.tolist():
            depth = [0]
            for parent in parents[1:]:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            rows.append(depth)
        return np.array(rows)

    def ancestors(self, row: int, node: int) -> list[int]:
        """Path from node 0 down to `node`, both included."""
        parent, path = self.parent[row], []
        while node >= 0:
            path.append(node)
            node = int(parent[node])
        return path[::-1]

    def children(self, row: int) -> dict[int, list[int]]:
        """Live children of every node of a row that has any, in drawing order."""
        found: dict[int, list[int]] = {}
        parent, live = self.parent[row].tolist(), self.live[row].tolist()
        for node in range(int(self.trunk[row]), self.nodes):
            if live[node]:
                found.setdefault(parent[node], []).append(node)
        return found

    def follow(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Nodes below the root that spell `tokens`, as far as the tree has them."""
        children, node, path = self.children(row), int(self.trunk[row]) - 1, list[int]()
        for token in tokens:
            step = next((c for c in children.get(node, ()) if self.token[row, c] == token), None)
            if step is None:
                break
            path.append(step)
            node = step
        return path

    def limited(self, room: Int[np.ndarray, " b"]) -> "TokenTree":
        """The tree without drafts deeper than `room[i]` below the root of row `i`."""
        if self.nodes == 1:
            return self
        below = self.depth - (self.trunk - 1)[:, None]
        if (below <= room[:, None]).all():
            return self
        return replace(self, live=self.live & (below <= room[:, None]))

    def with_probes(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        scored: Sequence[Collection[int]] | None = None,
    ) -> "TokenTree":
        """The tree and nodes that the target reads and never accepts, from index `nodes` on, padded to the longest row.

        `parents` are indices in the new tree; a probe may hang below the root, a draft or an earlier probe. `scored`: indices in the new tree of the
        probes whose scores are needed (None: of all).
        """
        first, most = self.nodes, max(len(t) for t in tokens)
        if most == 0:
            return self
        out = concatenate([self, _blank(0, first + most)])
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            end = first + len(token)
            out.token[row, first:end] = token
            out.parent[row, first:end] = parent
            out.probe[row, first:end] = True
        if scored is None:
            return out
        silent = np.zeros_like(out.probe) if out.silent is None else out.silent.copy()
        for row, (token, wanted) in enumerate(zip(tokens, scored, strict=True)):
            silent[row, first : first + len(token)] = [node not in wanted for node in range(first, first + len(token))]
        return replace(out, silent=silent)

    def select(self, rows: Int[np.ndarray, " b"]) -> "TokenTree":
        """The trees of these rows, in this order."""
        return replace(
            self,
            token=self.token[rows],
            parent=self.parent[rows],
            live=self.live[rows],
            probe=self.probe[rows],
            drawn_from=self.drawn_from[rows],
            trunk=self.trunk[rows],
            distinct=self.distinct[rows],
            q=None if self.q is None else self.q[torch.from_numpy(rows).to(self.q.device)],
            silent=None if self.silent is None else self.silent[rows],
        )

    def with_trunk(self, unread: Sequence[Sequence[int]]) -> "TokenTree":
        """The tree hung below all decided but unread tokens; `unread[i]` ends with the present root of row `i`."""
        sizes = np.array([len(u) for u in unread], dtype=np.int64)
        if (sizes == self.trunk).all():
            return self
        n = int(sizes.max()) + self.nodes - 1
        out = _blank(self.rows, n)
        silent = None if self.silent is None else np.zeros_like(out.probe)
        for row, decided in enumerate(unread):
            k, end = len(decided), len(decided) + self.nodes - 1
            out.token[row, :k] = decided
            out.parent[row, :k] = np.arange(-1, k - 1)
            out.live[row, :k] = True
            out.token[row, k:end] = self.token[row, 1:]
            out.parent[row, k:end] = self.parent[row, 1:] + k - 1
            out.live[row, k:end] = self.live[row, 1:]
            out.probe[row, k:end] = self.probe[row, 1:]
            out.drawn_from[row, k:end] = self.drawn_from[row, 1:]
            if silent is not None and self.silent is not None:
                silent[row, k:end] = self.silent[row, 1:]
        return replace(out, trunk=sizes, q=self.q, distinct=self.distinct, silent=silent, inputs=self.inputs)


def _blank(rows: int, nodes: int) -> TokenTree:
    return TokenTree(
        token=np.zeros((rows, nodes), np.int64),
        parent=np.full((rows, nodes), -1, np.int64),
        live=np.zeros((rows, nodes), bool),
        probe=np.zeros((rows, nodes), bool),
        drawn_from=np.full((rows, nodes), -1, np.int64),
        trunk=np.ones(rows, np.int64),
        distinct=np.zeros(rows, bool),
    )


def root(tokens: Sequence[int]) -> TokenTree:
    """Trees of a root only, one per text: what plain decoding verifies."""
    out = _blank(len(tokens), 1)
    out.token[:, 0] = tokens
    out.live[:, 0] = True
    return out


def from_lists(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> TokenTree:
    """Trees of picked nodes from ragged lists; entry 0 of each is the root with parent -1. Padded to the longest."""
    out = _blank(len(tokens), max(len(t) for t in tokens))
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        out.token[row, : len(token)] = token
        out.parent[row, : len(token)] = parent
        out.live[row, : len(token)] = True
    return out


def hung(
    roots: Sequence[int],
    which: Int[np.ndarray, " a"],
    token: Int[np.ndarray, "a m"],
    parent: Int[np.ndarray, "a m"],
    count: Int[np.ndarray, " a"],
) -> TokenTree:
    """Trees of `count` picked nodes below some of the roots; the others stand alone. `parent` 0 is the root, 1 the first node."""
    tokens, parents = [[token] for token in roots], [[-1] for _ in roots]
    for i, n, nodes, above in zip(which.tolist(), count.tolist(), token, parent, strict=True):
        tokens[i] += nodes[:n].tolist()
        parents[i] += above[:n].tolist()
    return from_lists(tokens, parents)


def joined(first: TokenTree, second: TokenTree) -> TokenTree:
    """Both trees of picked nodes below the same roots in one: what both guess stands there once, children of `first` before those of `second`."""
    tokens, parents = list[list[int]](), list[list[int]]()
    for row in range(first.rows):
        token, parent, known = [int(first.token[row, 0])], [-1], dict[tuple[int, int], int]()
        for tree in (first, second):
            place = {0: 0}
            for node in np.nonzero(tree.live[row])[0][1:].tolist():
                key = place[int(tree.parent[row, node])], int(tree.token[row, node])
                if key not in known:
                    known[key] = len(token)
                    parent.append(key[0])
                    token.append(key[1])
                place[node] = known[key]
        tokens.append(token)
        parents.append(parent)
    return from_lists(tokens, parents)


def concatenate(trees: Sequence[TokenTree]) -> TokenTree:
    """Stack trees of different texts into one batch, padding to the widest.

    Raises:
        ValueError: two trees have different `inputs`.
    """
    if len(trees) == 1:
        return trees[0]
    n = max(t.nodes for t in trees)
    qs = [t.q for t in trees if t.q is not None]
    q = None
    if qs:
        m = max(x.shape[1] for x in qs)
        q = torch.zeros(sum(t.rows for t in trees), m, qs[0].shape[2], dtype=qs[0].dtype, device=qs[0].device)
    out, at = _blank(sum(t.rows for t in trees), n), 0
    for t in trees:
        rows = slice(at, at + t.rows)
        for name in ("token", "parent", "live", "probe", "drawn_from"):
            getattr(out, name)[rows, : t.nodes] = getattr(t, name)
        out.trunk[rows], out.distinct[rows] = t.trunk, t.distinct
        if q is not None and t.q is not None:
            q[rows, : t.q.shape[1]] = t.q
        at += t.rows
    silent = None
    if any(t.silent is not None for t in trees):
        padded = [np.pad(_silent(t), ((0, 0), (0, n - t.nodes))) for t in trees]
        silent = np.concatenate(padded)
    inputs = next((t.inputs for t in trees if t.inputs is not None), None)
    if any(t.inputs is not None and t.inputs is not inputs for t in trees):
        raise ValueError(
            "trees with inputs of their own cannot be read together: their token ids would mean two things"
        )
    return replace(out, q=q, silent=silent, inputs=inputs)


def _silent(tree: TokenTree) -> Bool[np.ndarray, "b n"]:
    return np.zeros_like(tree.probe) if tree.silent is None else tree.silent
