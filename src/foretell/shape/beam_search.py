"""Beam search: the best sequences of one length, as a tree in which common beginnings are read once."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from foretell.core.context import Context
from foretell.core.tree import NodeMask, TokenTree, tree_from_lists
from foretell.draft.base import Predictor
from foretell.shape.base import Shape, TreeBuilder


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
        builder = TreeBuilder(context)
        last = np.ones((len(context.rows), 1), bool)
        score = np.ones((len(context.rows), 1))
        for _ in range(min(self.depth, int(context.max_depth.max()))):
            score = self._extend(builder, draft, score)
            valid = builder.tree.valid[:, -score.shape[1] :] if score.shape[1] else np.zeros((len(score), 0), bool)
            # Where a request has sequences of this length, the shorter ones are no results of it.
            last = np.concatenate([last & ~valid.any(1, keepdims=True), valid], 1)
            if not valid.any():
                break
        return _paths_to(builder.tree, last)

    def _extend(self, builder: TreeBuilder, draft: Predictor, score: Float[np.ndarray, "b f"]) -> np.ndarray:
        """Add the best `width` continuations of the frontier; their scores."""
        best, row = builder.top_tokens(draft, self.width), np.arange(len(score))[:, None]
        index = best.logit_index[row, builder.frontier]
        open_ = (
            builder.tree.valid[row, builder.frontier]
            & (builder.depth < builder.context.max_depth)[:, None]
            & (index >= 0)
        )
        count = best.token.shape[1]
        token, new = np.zeros((*index.shape, count), np.int64), np.zeros((*index.shape, count))
        token[open_] = best.token[index[open_]]
        new[open_] = score[open_][:, None] * best.probability[index[open_]]
        token, new = token.reshape(len(score), -1), new.reshape(len(score), -1)
        order = np.argsort(-new, axis=1, kind="stable")[:, : self.width]
        builder.add(builder.frontier[row, order // max(count, 1)], token[row, order], new[row, order] > 0)
        return np.asarray(new[row, order])


def _paths_to(tree: TokenTree, last: NodeMask) -> TokenTree:
    """The part of trees that leads to some nodes."""
    tokens, parents = list[list[int]](), list[list[int]]()
    for row in range(tree.rows):
        kept = sorted({0, *(node for end in np.flatnonzero(last[row]) for node in tree.ancestors(row, int(end)))})
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens.append(tree.token[row, kept].tolist())
        parents.append([place[int(parent)] for parent in tree.parent[row, kept]])
    out = tree_from_lists(tokens, parents)
    return replace(out, parent=np.where(out.valid, out.parent, 0))
