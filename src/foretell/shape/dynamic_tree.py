"""EAGLE-2's dynamic draft tree, which expands the nodes that the drafter is most confident of."""

from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape, TreeBuilder, add_best, take_nodes

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
            new = add_best(builder, best, frontier[:, :count], active[:, :count], self.budget, bounds[0])
            if not new.shape[1]:
                break
            score = np.concatenate([score, new], 1)
        return self._rerank(replace(builder.build(), score=score), score)

    def _may_have_kept(self, score: np.ndarray, frontier: np.ndarray) -> np.ndarray:
        """Whether a child of a node may be among the best `budget` ones: it scores at most what the node does."""
        return np.asarray((score[:, None, 1:] >= frontier[:, :, None]).sum(2) < self.budget)

    def _rerank(self, tree: TokenTree, score: np.ndarray) -> TokenTree:
        """Keep the root and the best `budget` nodes; ties go to the earlier, shallower node."""
        if tree.nodes <= self.budget + 1:
            return tree
        order = np.argsort(-np.where(tree.valid, score, -1.0)[:, 1:], axis=1, kind="stable")[:, : self.budget] + 1
        keep = np.concatenate([np.zeros((tree.rows, 1), np.int64), np.sort(order, axis=1)], 1)
        return take_nodes(tree, keep)
