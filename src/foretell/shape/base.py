"""The interface of shapes, which build token trees from a drafter, and functions that shapes over predictors share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.noise import target_noise
from foretell.core.sampling import Stream, sample_from
from foretell.core.tree import TokenTree, root_tree
from foretell.distributions.processed import ProcessedDistributions, Reads
from foretell.distributions.sampler import NoTokenError
from foretell.draft.base import Drafter, Frontier, Predictor, TopTokens

D = TypeVar("D", bound=Drafter, contravariant=True)


class Shape(ABC, Generic[D]):
    """Builds token trees from one kind of drafter."""

    label: ClassVar[str] = ""
    """Short description of the tree for the table of methods."""
    drafter_type: ClassVar[type[Drafter] | tuple[type[Drafter], ...]]
    """The kind of drafter that it needs, or several."""
    elastic: bool = False
    """Whether its size is a bound: the engine's budget always chooses how many of its nodes are verified."""

    @abstractmethod
    def grow(self, draft: D, context: Context) -> TokenTree:
        """One tree per request with a prefix of 1."""

    def observe(self, step: StepResult) -> None:
        """Update state after every pass of the target; what belongs to a request is kept by its sequence."""
        return

    def sources(self, draft: D) -> "tuple[Source, ...]":
        """The drafters that offer drafts, each with its shape; the engine's budget asks them in this order."""
        return ((draft, self),)


Source = tuple[Drafter, Shape[Any]]


class RootOnly(Shape[Drafter]):
    """No drafts: plain decoding."""

    label = "root"

    drafter_type = Drafter

    def grow(self, draft: Drafter, context: Context) -> TokenTree:
        """Roots only."""
        return root_tree(context.last_tokens)


class TreeBuilder:
    """Builds trees of several requests level by level; a node is not valid where a request has no token for it."""

    def __init__(self, context: Context, distinct: bool = False) -> None:
        self.context = context
        self.tree = replace(root_tree(context.last_tokens), distinct=np.full(len(context.rows), distinct))
        self.frontier: Frontier = np.zeros((len(context.rows), 1), np.int64)
        self._q: list[list[Float[torch.Tensor, " v"]]] = [[] for _ in context.rows]
        self.depth = 0
        """Levels below the roots built so far."""
        self._noise = target_noise(context, int(context.max_depth.max(initial=0)))

    @property
    def expandable(self) -> Bool[np.ndarray, "b f"]:
        """Which nodes of the frontier may have children: those that are valid and above the maximum depth."""
        # Indexed pairwise: `take_along_axis` costs several times as much on arrays as small as these.
        valid: Bool[np.ndarray, "b f"] = self.tree.valid[np.arange(len(self.frontier))[:, None], self.frontier]
        return valid & (self.depth < self.context.max_depth)[:, None]

    @property
    def grows(self) -> bool:
        """Whether any node of the frontier may have children."""
        return bool(self.expandable.any())

    def expand(self, draft: Predictor) -> ProcessedDistributions:
        """The drafter's distributions after the frontier, on the host, which chooses the children from them."""
        logits, logit_index = draft.expand(self.tree, self.frontier, self.context)
        distributions = ProcessedDistributions(self.context, self.tree, logits, logit_index)
        return distributions.on_host([Reads.DISTRIBUTIONS] * self.tree.rows)

    def top_tokens(self, draft: Predictor, count: int) -> TopTokens:
        """The drafter's most probable tokens after the frontier; where it may know the target's noise, given that."""
        if self._noise is None or self.depth >= self._noise.key.shape[1]:
            return draft.top_tokens(self.tree, self.frontier, self.context, count)
        noise = self._noise.at(self.depth, self.frontier)
        return draft.top_tokens(self.tree, self.frontier, self.context, count, noise)

    def add_distribution(self, row: int, q: Float[torch.Tensor, " v"]) -> int:
        """Store a distribution that nodes of `row` are sampled from; its index in `q`."""
        self._q[row].append(q)
        return len(self._q[row]) - 1

    def add(
        self,
        parent: Int[np.ndarray, "b f"],
        token: Int[np.ndarray, "b f"],
        valid: Bool[np.ndarray, "b f"],
        q_index: Int[np.ndarray, "b f"] | None = None,
    ) -> None:
        """Append a level of nodes, which becomes the frontier."""
        t, first = self.tree, self.tree.nodes
        self.tree = replace(
            t,
            token=np.concatenate([t.token, token], 1),
            parent=np.concatenate([t.parent, parent], 1),
            valid=np.concatenate([t.valid, valid], 1),
            probe=np.concatenate([t.probe, np.zeros_like(valid)], 1),
            q_index=np.concatenate([t.q_index, np.full_like(token, -1) if q_index is None else q_index], 1),
        )
        self.frontier = np.arange(first, first + token.shape[1]) + np.zeros_like(token)
        self.depth += 1

    def build(self) -> TokenTree:
        """The finished tree with the distributions that its nodes were sampled from."""
        count = max(len(q) for q in self._q)
        if count == 0:
            return self.tree
        some = next(q for rows in self._q for q in rows)
        packed = some.new_zeros(len(self._q), count, some.shape[-1])
        for row, distributions in enumerate(self._q):
            for i, q in enumerate(distributions):
                packed[row, i] = q
        return replace(self.tree, q=packed)


def add_top_ranks(
    builder: TreeBuilder, best: TopTokens, ranks: Sequence[Sequence[int]], active: Bool[np.ndarray, " b"] | None = None
) -> None:
    """Add the tokens of the ranks `ranks[i]` as children of the `i`-th frontier node of every row.

    A child is not valid where its parent cannot be expanded or has no token of that rank. `active`: the rows that may
    have children; None: all.
    """
    which = np.repeat(np.arange(len(ranks)), [len(r) for r in ranks])
    rank = np.array([r for part in ranks for r in part])
    parent, row = builder.frontier[:, which], np.arange(len(builder.frontier))[:, None]
    index, count = best.logit_index[row, parent], best.token.shape[1]
    valid = builder.expandable[:, which] & (index >= 0) & (rank < count)
    if active is not None:
        valid &= active[:, None]
    token = np.zeros_like(parent)
    if valid.any():
        place = np.maximum(index, 0), np.minimum(rank, count - 1)[None]
        valid &= best.probability[place] > 0
        token[valid] = best.token[place][valid]
    builder.add(parent, token, valid)


def add_best(
    builder: TreeBuilder,
    best: TopTokens,
    score: Float[np.ndarray, "b f"],
    active: Bool[np.ndarray, "b f"],
    most: int,
    least: float = 0.0,
) -> Float[np.ndarray, "b n"]:
    """Add the best tokens after the `active` nodes of the frontier, at most `most` per row and in falling order of
    their scores, which are returned: that of the parent, `score`, times the token's probability, at least `least`.
    """
    row, count = np.arange(len(score))[:, None], best.token.shape[1]
    index = best.logit_index[row, builder.frontier]
    valid = builder.expandable & (index >= 0) & active
    token, new = np.zeros((*index.shape, count), np.int64), np.zeros((*index.shape, count))
    if valid.any():
        token[valid] = best.token[index[valid]]
        new[valid] = score[valid][:, None] * best.probability[index[valid]]
    token, new = token.reshape(len(score), -1), new.reshape(len(score), -1)
    good = (new > 0) & (new >= least)
    order = np.argsort(-np.where(good, new, -1.0), axis=1, kind="stable")[:, : min(most, good.sum(1).max())]
    if order.shape[1]:
        builder.add(builder.frontier[row, order // count], token[row, order], good[row, order])
    return np.asarray(new[row, order])


def take_nodes(tree: TokenTree, nodes: Int[np.ndarray, "b m"]) -> TokenTree:
    """The trees of these nodes, each row's in this order: the root first, and ancestors before what is below them."""
    place = np.zeros_like(tree.parent)
    np.put_along_axis(place, nodes, np.arange(nodes.shape[1])[None], 1)

    def take(x: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, nodes, 1)

    valid, parent = take(tree.valid), np.take_along_axis(place, np.maximum(take(tree.parent), 0), 1)
    # The parent of a node that is not valid may have been left out: use the root.
    parent = np.where(valid, parent, 0)
    parent[:, 0] = -1
    return replace(
        tree,
        token=take(tree.token),
        parent=parent,
        valid=valid,
        probe=take(tree.probe),
        q_index=take(tree.q_index),
        score=None if tree.score is None else take(tree.score),
    )


def expand_level(
    builder: TreeBuilder,
    drafters: Sequence[ProcessedDistributions],
    ranks: Sequence[Sequence[int]],
    draw: bool,
    active: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
) -> None:
    """Add one child per entry of `ranks[i]` to the `i`-th frontier node of every row: the token of that rank or, with
    `draw`, a sampled one.

    A child is not valid where its parent cannot be expanded, or where the vocabulary or a distribution has no further
    token: after truncation, or because a bias forbids all that the drafter knows. `active`: the rows that may have
    children; None: all.

    Of several drafters, which must be asked for different tokens, the children of the `i`-th frontier node are those of
    one after another, beginning with number `turns[i]`.
    """
    b, width, expandable = len(builder.frontier), sum(len(r) for r in ranks), builder.expandable
    parent = np.repeat(builder.frontier, [len(r) for r in ranks], axis=1)
    token, valid, q_index = (
        np.zeros((b, width), np.int64),
        np.zeros((b, width), bool),
        np.full((b, width), -1, np.int64),
    )
    for row in range(b) if active is None else active:
        first = 0
        for i, (node, node_ranks) in enumerate(zip(builder.frontier[row].tolist(), ranks, strict=True)):
            if node_ranks and expandable[row, i]:
                turn = 0 if turns is None else turns[i]
                order = [drafters[(turn + k) % len(drafters)] for k in range(max(node_ranks) + 1)]
                with suppress(NoTokenError):
                    for k, t, q in _child_tokens(builder, order, row, node, node_ranks, draw, first):
                        token[row, first + k], valid[row, first + k], q_index[row, first + k] = t, True, q
            first += len(node_ranks)
    builder.add(parent, token, valid, q_index)


def _child_tokens(
    builder: TreeBuilder,
    drafters: Sequence[ProcessedDistributions],
    row: int,
    node: int,
    ranks: Sequence[int],
    draw: bool,
    first: int,
) -> list[tuple[int, int, int]]:
    """Children of a node as (place among them, token, index of the distribution that it was sampled from; -1: not
    sampled). `drafters`: whose the children are, one after another; a token of an earlier one is left out of the later
    ones' distributions, so that siblings without replacement are distinct whoever drafted them.

    The `i`-th sample uses random number `first + i`: no two samples of a level share one, so that parallel chains are
    independent. At temperature 0 children are the most probable tokens.

    Raises:
        NoTokenError: the distribution is empty.
    """
    if not draw or drafters[0].sampling_params(row).temperature == 0:
        if tuple(ranks) == (0,):
            coupled = builder.context.coupled and not draw
            return [(0, (drafters[0].sample if coupled else drafters[0].argmax)(row, node), -1)]
        ranked = _rank_tokens(drafters, row, node)
        return [(i, token, -1) for i, r in enumerate(ranks) if (token := ranked[r]) is not None]
    known, out = dict[int, tuple[torch.Tensor, int]](), list[tuple[int, int, int]]()
    for i, drafter in enumerate(drafters[: len(ranks)]):
        if id(drafter) not in known:
            q = drafter.probabilities(row, node)
            known[id(drafter)] = q, builder.add_distribution(row, q)
        q, q_index = known[id(drafter)]
        if out and builder.tree.distinct[row]:
            q = q.index_fill(0, torch.tensor([token for _, token, _ in out], device=q.device), 0)
            if not q.sum() > 0:
                continue
        out.append((i, sample_from(q, drafter.uniform(row, node, Stream.DRAFT, first + i)), q_index))
    return out


def _rank_tokens(drafters: Sequence[ProcessedDistributions], row: int, node: int) -> list[int | None]:
    """The most probable token of each drafter after a node that no earlier one has; None: it has none."""
    best, out = dict[int, list[int]](), list[int | None]()
    for drafter in drafters:
        if id(drafter) not in best:
            confidence = drafter.confidence(row, node)
            top = confidence.topk(min(len(drafters), len(confidence)))
            best[id(drafter)] = top.indices[top.values > 0].tolist()
        out.append(next((token for token in best[id(drafter)] if token not in out), None))
    return out
