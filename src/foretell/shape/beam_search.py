"""Beam search: the best sequences of one length, as a tree in which common beginnings are read once."""

from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape, TreeBuilder, add_best, take_nodes


@dataclass(frozen=True)
class BeamSearch(Shape[Predictor]):
    """Per depth the `width` best sequences are kept; those of the last depth form the tree (ReDrafter, arXiv
    2403.09919).

    The score of a sequence is the product of the drafter's probabilities. A node that no last sequence goes through is
    left out, so there are at most `width * depth` nodes.

    Raises:
        ValueError: a depth or width below 1.
    """

    label = "beam search"

    depth: int
    width: int

    drafter_type = Predictor

    def __post_init__(self) -> None:
        if min(self.depth, self.width) < 1:
            raise ValueError(
                f"beam search needs a depth and a width of at least 1, found {self.depth} and {self.width}"
            )

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The tree of the best sequences for each request."""
        builder, score = TreeBuilder(context), np.ones((len(context.rows), 1))
        kept = np.ones((len(context.rows), 1), bool)
        for _ in range(min(self.depth, int(context.max_depth.max()))):
            best = builder.top_tokens(draft, self.width)
            score = add_best(builder, best, score, np.ones(score.shape, bool), self.width)
            if not score.shape[1]:
                break
            valid = builder.tree.valid[:, -score.shape[1] :]
            # Where a request has sequences of this length, the shorter ones are no results of it.
            kept = np.concatenate([kept & ~valid.any(1, keepdims=True), valid], 1)
        tree, row = builder.build(), np.arange(len(context.rows))
        for node in range(tree.nodes - 1, 0, -1):
            kept[row, tree.parent[:, node]] |= kept[:, node]
        # Without the others, which would take room in the cache.
        order = np.argsort(~kept, axis=1, kind="stable")
        return take_nodes(replace(tree, valid=kept), order[:, : kept.sum(1).max()])
