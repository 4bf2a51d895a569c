"""The token tree: drafted continuations of a sequence that share their prefixes and are verified in one pass.

The structure (tokens, parents, flags) is in numpy on the host; distributions are torch tensors on the device. Row `i`
of every array belongs to the `i`-th request of the step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

TreeSizes: TypeAlias = tuple[int, int, int]
"""Depth, width and budget of a dynamic tree."""
TreeBounds: TypeAlias = tuple[float, float]
"""Minimum score of a node of a dynamic tree, and of a node that is expanded."""
NodeMask: TypeAlias = Bool[np.ndarray, "b n"]
"""Some nodes of the trees of a batch."""


@dataclass(frozen=True)
class TokenTree:
    """Token trees of `b` requests with `n` nodes each.

    Nodes `0 .. prefix_length-1` of a row are tokens of the sequence that the target has not read yet (a prompt chunk,
    or only the last token): a chain that ends in the *root* of the drafts. Every other node is a drafted token or a
    probe; `parent[i] < i` always. Example with a prefix of 1::

        index   0     1     2     3         the ──┬─ cat ── sat
        token   the   cat   dog   sat             └─ dog
        parent  -1    0     0     1
        depth   0     1     1     2
    """

    token: Int[np.ndarray, "b n"]
    parent: Int[np.ndarray, "b n"]
    valid: NodeMask
    """False: padding or a probe, which are never accepted."""
    probe: NodeMask
    """True: the target reads the node for the drafter only."""
    q_index: Int[np.ndarray, "b n"]
    """Row of `q` that the node was sampled from; -1: chosen without sampling, so its distribution is one-hot."""
    prefix_length: Int[np.ndarray, " b"]
    distinct: Bool[np.ndarray, " b"]
    """Whether sampled siblings were drawn without replacement."""
    q: Float[torch.Tensor, "b m v"] | None = None
    """Distributions that nodes were sampled from, after all sampling parameters."""
    unscored: NodeMask | None = None
    """Probes whose logits are not needed; None: no node."""
    probe_embeddings: Float[torch.Tensor, "e d"] | None = None
    """Input embeddings of the ids from the vocabulary's size on, which probes may have; None: all ids are tokens."""

    score: Float[np.ndarray, "b n"] | None = None
    """The drafter's estimate of the probability that a node is accepted; None: it gives none. It falls along every
    path."""

    @property
    def rows(self) -> int:
        """Number of requests."""
        return len(self.token)

    @property
    def nodes(self) -> int:
        """Number of nodes per request, padding included."""
        return int(self.token.shape[1])

    @cached_property
    def is_decode(self) -> bool:
        """Whether every prefix is the last token alone, so that no prompt is read."""
        return all(length == 1 for length in self.prefix_length.tolist())

    @cached_property
    def active(self) -> NodeMask:
        """Nodes that the target reads."""
        no_probes = self.probe is _unsampled(self.rows, self.nodes)[0]
        return self.valid if no_probes else self.valid | self.probe

    @cached_property
    def active_count(self) -> int:
        """Number of nodes that the target reads, of all requests together."""
        return int(np.count_nonzero(self.active))

    @cached_property
    def drafted_counts(self) -> list[int]:
        """Number of drafted tokens of every request."""
        pairs = zip(self.valid.tolist(), self.prefix_length.tolist(), strict=True)
        return [row.count(True) - length for row, length in pairs]

    @cached_property
    def scored(self) -> NodeMask:
        """Nodes whose logits may be needed."""
        return self.active if self.unscored is None else self.active & ~self.unscored

    @cached_property
    def depth(self) -> Int[np.ndarray, "b n"]:
        """Distance of every node from node 0; 0 for padding."""
        rows = list[list[int]]()
        for parents in self.parent.tolist():
            depth = [0]
            for parent in parents[1:]:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            rows.append(depth)
        return np.array(rows)

    def root(self, row: int) -> int:
        """The root of a row: the last node of its prefix."""
        return int(self.prefix_length[row]) - 1

    def ancestors(self, row: int, node: int) -> list[int]:
        """Path from node 0 down to `node`, both included."""
        parent, path = self.parent[row], []
        while node >= 0:
            path.append(node)
            node = int(parent[node])
        return path[::-1]

    def children(self, row: int) -> dict[int, list[int]]:
        """Valid children of every node of a row that has any, in the order in which they were drafted."""
        children: dict[int, list[int]] = {}
        parent, valid, first = self.parent[row].tolist(), self.valid[row].tolist(), int(self.prefix_length[row])
        for node in range(first, len(valid)):
            if valid[node]:
                children.setdefault(parent[node], []).append(node)
        return children

    def find_path(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Nodes of the path below the root with these tokens, as far as the tree holds it."""
        children, node, path = self.children(row), self.root(row), list[int]()
        for token in tokens:
            child = next((c for c in children.get(node, ()) if self.token[row, c] == token), None)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def spread(self, roots: Sequence[int], which: Sequence[int]) -> "TokenTree":
        """Trees whose rows are the requests `which`, among all requests with these roots; the others get theirs alone,
        with a score of 1.
        """
        rows, b = list(which), len(roots)
        if rows == list(range(b)):
            return self
        sampled = self.probe is not _unsampled(self.rows, self.nodes)[0]
        size, names = (b, self.nodes), ["token", "parent", "valid"]
        if sampled:
            whole, names = _empty_trees(*size), [*names, "probe", "q_index", "distinct"]
        else:
            whole = _unsampled_trees(np.zeros(size, np.int64), np.full(size, -1), np.zeros(size, bool))
        whole.token[:, 0], whole.valid[:, 0] = roots, True
        for name in names:
            getattr(whole, name)[rows] = getattr(self, name)
        q, score = self.q, None
        if q is not None:
            q = q.new_zeros(b, *q.shape[1:])
            q[rows] = self.q
        if self.score is not None:
            score = np.zeros(size)
            score[:, 0], score[rows] = 1, self.score
        return replace(whole, q=q, score=score)

    def limit_depth(self, max_depth: Int[np.ndarray, " b"]) -> "TokenTree":
        """The tree without drafts deeper than `max_depth[i]` below the root of row `i`."""
        if all(self.nodes <= depth + 1 for depth in max_depth.tolist()):
            return self
        below = self.depth - (self.prefix_length - 1)[:, None]
        if (below <= max_depth[:, None]).all():
            return self
        return replace(self, valid=self.valid & (below <= max_depth[:, None]))

    def with_drafts(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> "TokenTree":
        """The tree with drafts appended from index `nodes` on, which were not sampled; `parents`: indices in the new
        tree. A new node has the score of its parent.
        """
        first, count = self.nodes, max(len(t) for t in tokens)
        if count == 0:
            return self
        out, score = concatenate_trees([self, _empty_trees(0, first + count)]), self.score
        if score is not None:
            score = np.pad(score, ((0, 0), (0, count)))
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            for node, (new, above) in enumerate(zip(token, parent, strict=True), first):
                out.token[row, node], out.parent[row, node], out.valid[row, node] = new, above, True
                if score is not None:
                    score[row, node] = score[row, above]
        return replace(out, score=score)

    def limit_drafts(self, most: Sequence[int | None]) -> "TokenTree":
        """The tree with at most `most[i]` drafts in row `i` (None: all of them; empty: in all rows): those of the best
        scores, or without scores the first ones, so that which drafts are left out does not depend on what was sampled.
        """
        if not most:
            return self
        excess = [i for i, m in enumerate(most) if m is not None and self.drafted_counts[i] > m]
        if not excess:
            return self
        valid = self.valid.copy()
        for row in excess:
            drafts = np.flatnonzero(valid[row])[int(self.prefix_length[row]) :]
            if self.score is not None:
                # Stable: of equals the earlier ones stay, so that a node's parent is kept.
                drafts = drafts[np.argsort(-self.score[row, drafts], kind="stable")]
            valid[row, drafts[most[row] :]] = False
        return replace(self, valid=valid)

    def with_probes(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        scored: Sequence[Collection[int]] | None = None,
    ) -> "TokenTree":
        """The tree with probes appended from index `nodes` on, padded to the longest row.

        `parents`: indices in the new tree; the parent of a probe may be the root, a draft or an earlier probe.
        `scored`: indices in the new tree of the probes whose logits are needed (None: all).
        """
        first, count = self.nodes, max(len(t) for t in tokens)
        if count == 0:
            return self
        out = concatenate_trees([self, _empty_trees(0, first + count)])
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            end = first + len(token)
            out.token[row, first:end] = token
            out.parent[row, first:end] = parent
            out.probe[row, first:end] = True
        if scored is None:
            return out
        unscored = np.zeros_like(out.probe) if out.unscored is None else out.unscored.copy()
        for row, (token, needed) in enumerate(zip(tokens, scored, strict=True)):
            unscored[row, first : first + len(token)] = [
                node not in needed for node in range(first, first + len(token))
            ]
        return replace(out, unscored=unscored)

    def shift_probe_ids(self, vocab: int, offset: int) -> "TokenTree":
        """The tree with `offset` added to the ids from `vocab` on, which index `probe_embeddings`."""
        return replace(self, token=np.where(self.token >= vocab, self.token + offset, self.token))

    def select(self, rows: Int[np.ndarray, " b"]) -> "TokenTree":
        """The trees of these rows, in this order."""
        return replace(
            self,
            token=self.token[rows],
            parent=self.parent[rows],
            valid=self.valid[rows],
            probe=self.probe[rows],
            q_index=self.q_index[rows],
            prefix_length=self.prefix_length[rows],
            distinct=self.distinct[rows],
            q=None if self.q is None else self.q[torch.from_numpy(rows).to(self.q.device)],
            unscored=None if self.unscored is None else self.unscored[rows],
            score=None if self.score is None else self.score[rows],
        )

    def with_prefix(self, unread: Sequence[Sequence[int]]) -> "TokenTree":
        """The tree below all tokens that the target has not read; `unread[i]` ends with the present root of row `i`."""
        lengths = [len(u) for u in unread]
        if lengths == self.prefix_length.tolist():
            return self
        sizes = np.array(lengths, dtype=np.int64)
        n = int(sizes.max()) + self.nodes - 1
        out = _empty_trees(self.rows, n)
        unscored = None if self.unscored is None else np.zeros_like(out.probe)
        for row, tokens in enumerate(unread):
            k, end = len(tokens), len(tokens) + self.nodes - 1
            out.token[row, :k] = tokens
            out.parent[row, :k] = np.arange(-1, k - 1)
            out.valid[row, :k] = True
            out.token[row, k:end] = self.token[row, 1:]
            out.parent[row, k:end] = self.parent[row, 1:] + k - 1
            out.valid[row, k:end] = self.valid[row, 1:]
            out.probe[row, k:end] = self.probe[row, 1:]
            out.q_index[row, k:end] = self.q_index[row, 1:]
            if unscored is not None and self.unscored is not None:
                unscored[row, k:end] = self.unscored[row, 1:]
        return replace(
            out,
            prefix_length=sizes,
            q=self.q,
            distinct=self.distinct,
            unscored=unscored,
            probe_embeddings=self.probe_embeddings,
        )


def _empty_trees(rows: int, nodes: int) -> TokenTree:
    return TokenTree(
        token=np.zeros((rows, nodes), np.int64),
        parent=np.full((rows, nodes), -1, np.int64),
        valid=np.zeros((rows, nodes), bool),
        probe=np.zeros((rows, nodes), bool),
        q_index=np.full((rows, nodes), -1, np.int64),
        prefix_length=np.ones(rows, np.int64),
        distinct=np.zeros(rows, bool),
    )


@lru_cache(1024)
def _unsampled(rows: int, nodes: int) -> tuple[np.ndarray, ...]:
    """`probe`, `q_index`, `prefix_length` and `distinct` of trees whose nodes were not sampled, and a mask of all their
    nodes; read-only, since many trees share them.
    """
    empty = _empty_trees(rows, nodes)
    parts = empty.probe, empty.q_index, empty.prefix_length, empty.distinct, np.ones((rows, nodes), bool)
    for part in parts:
        part.flags.writeable = False
    return parts


def _unsampled_trees(
    token: Int[np.ndarray, "b n"],
    parent: Int[np.ndarray, "b n"],
    valid: NodeMask | None,
    score: Float[np.ndarray, "b n"] | None = None,
) -> TokenTree:
    """Trees whose nodes were not sampled, with a prefix of 1; `valid` None: all nodes are."""
    probe, q_index, prefix_length, distinct, everywhere = _unsampled(*token.shape)
    valid = everywhere if valid is None else valid
    return TokenTree(token, parent, valid, probe, q_index, prefix_length, distinct, score=score)


def root_tree(tokens: Sequence[int]) -> TokenTree:
    """Trees of a root only, one per request: plain decoding."""
    no_parent = _unsampled(len(tokens), 1)[1]
    return _unsampled_trees(np.array(tokens, np.int64)[:, None], no_parent, None)


def tree_from_lists(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]] | None = None,
) -> TokenTree:
    """Trees of nodes that were not sampled, from ragged lists; entry 0 of each is the root with parent -1."""
    sizes = [len(t) for t in tokens]
    n = max(sizes)
    return _unsampled_trees(
        np.array([[*t, *[0] * (n - len(t))] for t in tokens], np.int64),
        np.array([[*p, *[-1] * (n - len(p))] for p in parents], np.int64),
        None if min(sizes) == n else np.arange(n) < np.array(sizes)[:, None],
        None if scores is None else np.array([[*s, *[0.0] * (n - len(s))] for s in scores]),
    )


def tree_from_scores(
    roots: Sequence[int],
    which: Sequence[int],
    token: Int[np.ndarray, "a m"],
    parent: Int[np.ndarray, "a m"],
    score: Float[np.ndarray, "a m"],
    count: Int[np.ndarray, " a"],
) -> TokenTree:
    """Trees of a root and the first `count` nodes after it, which were not sampled, for the requests `which`; the
    others get the root alone. The token of a root is set here; the arrays are kept and changed.
    """
    counts = count.tolist()
    n = max(counts) + 1
    token, parent, score = token[:, :n], parent[:, :n], score[:, :n]
    token[:, 0], score[:, 0] = [roots[i] for i in which], 1
    valid = None if min(counts) == n - 1 else np.arange(n) <= count[:, None]
    return _unsampled_trees(token, parent, valid, score).spread(roots, which)


def merge_trees(first: TokenTree, second: TokenTree) -> TokenTree:
    """The union of two trees with the same roots whose nodes were not sampled; children of `first` come before those of
    `second`. If both have scores, a node gets the higher one.
    """
    tokens, parents, scores = list[list[int]](), list[list[int]](), list[list[float]]()
    for row in range(first.rows):
        token, parent, known = [int(first.token[row, 0])], [-1], dict[tuple[int, int], int]()
        score = [1.0]
        for tree in (first, second):
            place = {0: 0}
            for node in np.nonzero(tree.valid[row])[0][1:].tolist():
                key = place[int(tree.parent[row, node])], int(tree.token[row, node])
                if key not in known:
                    known[key] = len(token)
                    parent.append(key[0])
                    token.append(key[1])
                    score.append(0.0)
                place[node] = known[key]
                if tree.score is not None:
                    score[known[key]] = max(score[known[key]], float(tree.score[row, node]))
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
    return tree_from_lists(tokens, parents, None if first.score is None or second.score is None else scores)


def concatenate_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Trees of different requests as one batch, padded to the widest; with scores if all have them.

    Raises:
        ValueError: two trees have different `probe_embeddings`.
    """
    if len(trees) == 1:
        return trees[0]
    n = max(t.nodes for t in trees)
    qs = [t.q for t in trees if t.q is not None]
    q = None
    if qs:
        m = max(x.shape[1] for x in qs)
        q = torch.zeros(sum(t.rows for t in trees), m, qs[0].shape[2], dtype=qs[0].dtype, device=qs[0].device)
    out, first = _empty_trees(sum(t.rows for t in trees), n), 0
    for t in trees:
        rows = slice(first, first + t.rows)
        for name in ("token", "parent", "valid", "probe", "q_index"):
            getattr(out, name)[rows, : t.nodes] = getattr(t, name)
        out.prefix_length[rows], out.distinct[rows] = t.prefix_length, t.distinct
        if q is not None and t.q is not None:
            q[rows, : t.q.shape[1]] = t.q
        first += t.rows
    unscored = None
    if any(t.unscored is not None for t in trees):
        padded = [np.pad(_unscored_mask(t), ((0, 0), (0, n - t.nodes))) for t in trees]
        unscored = np.concatenate(padded)
    score = None
    if all(t.score is not None for t in trees):
        score = np.concatenate([np.pad(t.score, ((0, 0), (0, n - t.nodes))) for t in trees if t.score is not None])
    probe_embeddings = next((t.probe_embeddings for t in trees if t.probe_embeddings is not None), None)
    if any(t.probe_embeddings is not None and t.probe_embeddings is not probe_embeddings for t in trees):
        raise ValueError(
            "trees with different probe embeddings cannot be in one pass: their token ids would be ambiguous"
        )
    return replace(out, q=q, unscored=unscored, probe_embeddings=probe_embeddings, score=score)


def join_probe_embeddings(trees: Sequence[TokenTree], vocab: int) -> tuple[list[TokenTree], list[int]]:
    """The trees with one table of probe embeddings for all that have any, and what was added to the ids of each."""
    start, tables = dict[int, int](), list[torch.Tensor]()
    for t in trees:
        if t.probe_embeddings is not None and id(t.probe_embeddings) not in start:
            start[id(t.probe_embeddings)] = sum(map(len, tables))
            tables.append(t.probe_embeddings)
    if len(tables) < 2:
        return list(trees), [0] * len(trees)
    joint = torch.cat([table.to(tables[0]) for table in tables])
    offsets = [start.get(id(t.probe_embeddings), 0) for t in trees]
    joined = [
        t if t.probe_embeddings is None else replace(t.shift_probe_ids(vocab, offset), probe_embeddings=joint)
        for t, offset in zip(trees, offsets, strict=True)
    ]
    return joined, offsets


def _unscored_mask(tree: TokenTree) -> NodeMask:
    return np.zeros_like(tree.probe) if tree.unscored is None else tree.unscored
