"""The contract of a shape: it arranges a drafter's guesses into a token tree.

Also the steps that predictor shapes share.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import BindingEngine
from foretell.core.sampling import sample_from
from foretell.core.tree import TokenTree, root_tree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft.base import Drafter, Predictor, TopTokens

D = TypeVar("D", bound=Drafter, contravariant=True)

DRAFT = 1 << 12
"""First random stream of drafting; acceptors use the ones below it."""


class Shape(ABC, Generic[D]):
    """Grows trees from one kind of drafter."""

    label: ClassVar[str] = ""
    """The form of the tree, in a few words, for the table of methods."""
    drafter_type: ClassVar[type[Drafter]]
    """The kind of drafter it can work with."""

    @abstractmethod
    def grow(self, draft: D, context: Context) -> TokenTree:
        """One tree per text, trunk 1."""

    def observe(self, step: StepResult) -> None:
        """Learn what became of the trees, after every pass of the target."""
        return

    def release(self, row: int) -> None:
        """Forget a row: its request is over."""
        return

    def bind(self, engine: BindingEngine) -> bool:
        """Serve this engine from now on (see `EngineBound`); shapes without state serve any number of them."""
        return False


class RootOnly(Shape[Drafter]):
    """No drafts at all: the tree of plain decoding."""

    label = "root"

    drafter_type = Drafter

    def grow(self, draft: Drafter, context: Context) -> TokenTree:
        """Roots only."""
        return root_tree(context.last_tokens)


class TreeBuilder:
    """A tree under construction: all rows grow the same places, dead where a row has nothing to put there."""

    def __init__(self, context: Context, distinct: bool = False) -> None:
        self.context = context
        self.tree = replace(root_tree(context.last_tokens), distinct=np.full(len(context.rows), distinct))
        self.frontier: Int[np.ndarray, "b f"] = np.zeros((len(context.rows), 1), np.int64)
        self._q: list[list[Float[torch.Tensor, " v"]]] = [[] for _ in context.rows]
        self.depth = 0
        """Levels below the roots so far."""

    def can_expand(self, row: int, node: int) -> bool:
        """Whether this node of the frontier may have children: it is live, and its text has room for them."""
        return bool(self.tree.valid[row, node] and self.depth < self.context.max_depth[row])

    def expand(self, draft: Predictor) -> ProcessedDistributions:
        """The drafter's distributions after the frontier."""
        logits, at = draft.expand(self.tree, self.frontier, self.context)
        return ProcessedDistributions(self.context, self.tree, logits, at)

    def top_tokens(self, draft: Predictor, count: int) -> TopTokens:
        """The drafter's likeliest tokens after the frontier."""
        return draft.top_tokens(self.tree, self.frontier, self.context, count)

    def add_distribution(self, row: int, q: Float[torch.Tensor, " v"]) -> int:
        """Keep a distribution that nodes of `row` are drawn from; its number."""
        self._q[row].append(q)
        return len(self._q[row]) - 1

    def add(
        self,
        parent: Int[np.ndarray, "b f"],
        token: Int[np.ndarray, "b f"],
        valid: Bool[np.ndarray, "b f"],
        q_index: Int[np.ndarray, "b f"] | None = None,
    ) -> None:
        """Append nodes, which become the frontier."""
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
        """The finished tree, with the distributions its drawn nodes came from."""
        most = max(len(q) for q in self._q)
        if most == 0:
            return self.tree
        some = next(q for rows in self._q for q in rows)
        packed = some.new_zeros(len(self._q), most, some.shape[-1])
        for row, distributions in enumerate(self._q):
            for i, q in enumerate(distributions):
                packed[row, i] = q
        return replace(self.tree, q=packed)


def add_top_ranks(
    builder: TreeBuilder, best: TopTokens, ranks: Sequence[Sequence[int]], active: Bool[np.ndarray, " b"] | None = None
) -> None:
    """Give the `i`-th frontier node of every row the tokens of the ranks `ranks[i]` as children; dead where it does not
    grow or has no such token.

    `active`: the rows that may have children; None: all.
    """
    which, rank = (
        np.repeat(np.arange(len(ranks)), [len(r) for r in ranks]),
        np.array([r for part in ranks for r in part]),
    )
    parent, row = builder.frontier[:, which], np.arange(len(builder.frontier))[:, None]
    at, most = best.logit_index[row, parent], best.token.shape[1]
    valid = (
        builder.tree.valid[row, parent] & (builder.depth < builder.context.max_depth)[:, None] & (at >= 0) & (rank < most)
    )
    if active is not None:
        valid &= active[:, None]
    token = np.zeros_like(parent)
    if valid.any():
        place = np.maximum(at, 0), np.minimum(rank, most - 1)[None]
        valid &= best.probability[place] > 0
        token[valid] = best.token[place][valid]
    builder.add(parent, token, valid)


def expand_level(
    builder: TreeBuilder,
    distributions: ProcessedDistributions,
    ranks: Sequence[Sequence[int]],
    draw: bool,
    active: Sequence[int] | None = None,
) -> None:
    """Give the `i`-th frontier node of every row one child per entry of `ranks[i]`: the token of that rank, or a draw.

    Children of nodes that do not grow are dead, as are those that the vocabulary or a truncated distribution cannot
    fill. `active`: the rows that may have children; None: all.
    """
    b, width = len(builder.frontier), sum(len(r) for r in ranks)
    parent = np.repeat(builder.frontier, [len(r) for r in ranks], axis=1)
    token, valid, origin = np.zeros((b, width), np.int64), np.zeros((b, width), bool), np.full((b, width), -1, np.int64)
    for row in range(b) if active is None else active:
        place = 0
        for node, wanted in zip(builder.frontier[row].tolist(), ranks, strict=True):
            if wanted and builder.can_expand(row, node):
                for j, (t, number) in enumerate(
                    _child_tokens(builder, distributions, row, node, wanted, draw, DRAFT + place)
                ):
                    token[row, place + j], valid[row, place + j], origin[row, place + j] = t, True, number
            place += len(wanted)
    builder.add(parent, token, valid, origin)


def _child_tokens(
    builder: TreeBuilder,
    distributions: ProcessedDistributions,
    row: int,
    node: int,
    ranks: Sequence[int],
    draw: bool,
    stream: int,
) -> list[tuple[int, int]]:
    """Children of a node as (token, number of the distribution drawn from; -1: picked).

    The `i`-th draw uses random stream `stream + i`: no two draws of a level share one, so that chains side by side are
    independent. At temperature 0 a draw is a pick: the distribution is one point, and further ranks are points of their
    own.
    """
    if not draw or distributions.sampling_params(row).temperature == 0:
        if tuple(ranks) == (0,):
            return [(distributions.argmax(row, node), -1)]
        confidence = distributions.confidence(row, node)
        best = confidence.topk(min(max(ranks) + 1, len(confidence))).indices.tolist()
        return [(best[r], -1) for r in ranks if r < len(best)]
    q = distributions.probabilities(row, node)
    number, left, out = builder.add_distribution(row, q), q, list[tuple[int, int]]()
    for i in range(len(ranks)):
        if i and builder.tree.distinct[row]:
            left = left.clone()
            left[out[-1][0]] = 0
            if not left.sum() > 0:
                break
        out.append((sample_from(left, distributions.uniform(row, node, stream + i)), number))
    return out
