"""EAGLE-2's dynamic draft tree, which expands the nodes that the drafter is most confident of."""

from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor, TopTokens
from foretell.shape.base import Shape, TreeBuilder

_EXPAND_FACTOR = 1.5
"""A node is expanded if its score is at least this times `min_score`: its best child mostly scores 1/2 to 2/3 of it."""


@dataclass(frozen=True)
class DynamicTree(Shape[Predictor]):
    """Per depth, the `width` best frontier nodes get `width` children each; finally the best `budget` of all nodes are
    kept (EAGLE-2, arXiv 2406.16858).

    A node's score is the product of the drafter's own probabilities along its path, so the ancestors of kept nodes are
    kept. Nodes with a score below `min_score` are pruned. `elastic`: see `Shape`.

    Raises:
        ValueError: a depth, width or budget below 1.
    """

    label = "dynamic tree"

    depth: int
    width: int
    budget: int
    min_score: float = 0.0
    min_expand_score: float | None = None
    """Least score of a node that is expanded; None: `_EXPAND_FACTOR` times `min_score`."""
    elastic: bool = False

    drafter_type = Predictor

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.budget) < 1:
            raise ValueError(
                "a dynamic tree needs depth, width and budget of at least 1, found "
                f"{self.depth}, {self.width}, {self.budget}"
            )

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The reranked tree for each request."""
        min_expand_score = self.min_expand_score
        if min_expand_score is None:
            min_expand_score = min(1.0, _EXPAND_FACTOR * self.min_score)
        bounds = max(self.min_score, context.least_score), max(min_expand_score, context.least_expanded)
        tree = draft.grow_dynamic_tree(context, (self.depth, self.width, self.budget), bounds)
        if tree is not None:
            return tree
        builder = TreeBuilder(context)
        score = np.ones((len(context.rows), 1))
        for _ in range(min(self.depth, int(context.max_depth.max()))):
            frontier = score[np.arange(len(score))[:, None], builder.frontier]
            active = (frontier >= bounds[1]) & self._may_have_kept(score, frontier)
            # Nodes of the frontier are in falling order of score.
            count = min(self.width, active.sum(1).max())
            if not count:
                break
            builder.frontier = builder.frontier[:, :count]
            best = builder.top_tokens(draft, self.width)
            new = self._expand(builder, best, score, active[:, :count], bounds[0])
            if not new.shape[1]:
                break
            score = np.concatenate([score, new], 1)
        return self._rerank(replace(builder.build(), score=score), score)

    def _may_have_kept(self, score: np.ndarray, frontier: np.ndarray) -> np.ndarray:
        """Whether a child of a node may be among the best `budget` ones: it scores at most what the node does."""
        return np.asarray((score[:, None, 1:] >= frontier[:, :, None]).sum(2) < self.budget)

    def _expand(
        self, builder: TreeBuilder, ranks: TopTokens, score: np.ndarray, active: np.ndarray, min_score: float
    ) -> np.ndarray:
        """Add the children of the `active` frontier nodes, in falling order of score per row; their scores."""
        # Indexed pairwise: `take_along_axis` costs several times as much on arrays as small as these.
        row = np.arange(len(score))[:, None]
        index = ranks.logit_index[row, builder.frontier]
        valid = (
            builder.tree.valid[row, builder.frontier]
            & (builder.depth < builder.context.max_depth)[:, None]
            & (index >= 0)
            & active
        )
        token, new = np.zeros((*index.shape, self.width), np.int64), np.zeros((*index.shape, self.width))
        if valid.any():
            width, which = ranks.token.shape[1], index[valid]
            token[valid, :width] = ranks.token[which]
            new[valid, :width] = score[row, builder.frontier][valid][:, None] * ranks.probability[which]
        token, new = token.reshape(len(score), -1), new.reshape(len(score), -1)
        good = (new > 0) & (new >= min_score)
        order = np.argsort(-np.where(good, new, -1.0), axis=1, kind="stable")[:, : min(self.budget, good.sum(1).max())]
        if order.shape[1]:
            builder.add(builder.frontier[row, order // self.width], token[row, order], good[row, order])
        return np.asarray(new[row, order])

    def _rerank(self, tree: TokenTree, score: np.ndarray) -> TokenTree:
        """Keep the root and the best `budget` nodes; ties go to the earlier, shallower node."""
        if tree.nodes <= self.budget + 1:
            return tree
        order = np.argsort(-np.where(tree.valid, score, -1.0)[:, 1:], axis=1, kind="stable")[:, : self.budget] + 1
        keep = np.concatenate([np.zeros((tree.rows, 1), np.int64), np.sort(order, axis=1)], 1)
        new_index = np.zeros_like(tree.parent)
        np.put_along_axis(new_index, keep, np.arange(keep.shape[1])[None], 1)

        def take(x: np.ndarray) -> np.ndarray:
            return np.take_along_axis(x, keep, 1)

        parent = np.take_along_axis(new_index, np.maximum(take(tree.parent), 0), 1)
        parent[:, 0] = -1
        # The parent of a kept node that is not valid may have been dropped: use the root.
        parent = np.where(take(tree.valid), parent, np.where(np.arange(keep.shape[1]) == 0, -1, 0))
        return replace(
            tree,
            token=take(tree.token),
            parent=parent,
            valid=take(tree.valid),
            probe=take(tree.probe),
            q_index=take(tree.q_index),
            score=take(score),
        )
