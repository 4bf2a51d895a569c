"""A tree grown where the drafter is confident: EAGLE-2's dynamic draft tree."""

from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor, TopTokens
from foretell.shape.base import Shape, TreeBuilder

_EXPAND_FACTOR = 1.5
"""A node is gone on from where its best child, which is mostly half to two thirds as likely, may be worth its place."""


@dataclass(frozen=True)
class DynamicTree(Shape[Predictor]):
    """Per depth the `width` best frontier nodes get `width` children each; at the end the best `budget` of all nodes
    stay (arXiv 2406.16858).

    A node's score is the product of the drafter's own probabilities along its path, so kept nodes always have their
    ancestors. `least` prunes nodes whose score is below it.
    """

    label = "dynamic tree"

    depth: int
    width: int
    budget: int
    min_score: float = 0.0

    drafter_type = Predictor

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.budget) < 1:
            raise ValueError(
                f"a beam needs depth, width and budget of at least 1, found {self.depth}, {self.width}, {self.budget}"
            )

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The reranked tree per text."""
        stop = min(1.0, _EXPAND_FACTOR * self.min_score)
        whole = draft.grow_dynamic_tree(context, (self.depth, self.width, self.budget), (self.min_score, stop))
        if whole is not None:
            return whole
        builder = TreeBuilder(context)
        score = np.ones((len(context.rows), 1))
        for _ in range(min(self.depth, int(context.max_depth.max()))):
            active = score[np.arange(len(score))[:, None], builder.frontier] >= stop
            # The best come first.
            most = min(self.width, active.sum(1).max())
            if not most:
                break
            builder.frontier = builder.frontier[:, :most]
            new = self._expand(builder, builder.top_tokens(draft, self.width), score, active[:, :most])
            if not new.shape[1]:
                break
            score = np.concatenate([score, new], 1)
        return self._rerank(builder.build(), score)

    def _expand(self, builder: TreeBuilder, ranks: TopTokens, score: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Add the children of the frontier where it is `active` on, the best of each text first; their scores."""
        # Indexed pairwise: `take_along_axis` costs several times as much on arrays as small as these.
        row = np.arange(len(score))[:, None]
        at = ranks.logit_index[row, builder.frontier]
        valid = (
            builder.tree.valid[row, builder.frontier]
            & (builder.depth < builder.context.max_depth)[:, None]
            & (at >= 0)
            & active
        )
        token, new = np.zeros((*at.shape, self.width), np.int64), np.zeros((*at.shape, self.width))
        if valid.any():
            width, which = ranks.token.shape[1], at[valid]
            token[valid, :width] = ranks.token[which]
            new[valid, :width] = score[row, builder.frontier][valid][:, None] * ranks.probability[which]
        token, new = token.reshape(len(score), -1), new.reshape(len(score), -1)
        worth = (new > 0) & (new >= self.min_score)
        order = np.argsort(-np.where(worth, new, -1.0), axis=1, kind="stable")[
            :, : min(self.budget, worth.sum(1).max())
        ]
        if order.shape[1]:
            builder.add(builder.frontier[row, order // self.width], token[row, order], worth[row, order])
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
        # A dead node kept as padding may name an ancestor that was dropped: hang it on the root.
        parent = np.where(take(tree.valid), parent, np.where(np.arange(keep.shape[1]) == 0, -1, 0))
        return replace(
            tree,
            token=take(tree.token),
            parent=parent,
            valid=take(tree.valid),
            probe=take(tree.probe),
            q_index=take(tree.q_index),
        )
