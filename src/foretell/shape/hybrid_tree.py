"""Drafts from retrieval and from a model, merged."""

from dataclasses import replace

import numpy as np

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree, merge_trees
from foretell.draft.base import Predictor
from foretell.draft.hybrid import HybridDrafter
from foretell.shape.base import Shape, Source
from foretell.shape.chain import Chain
from foretell.shape.trie import Trie


class HybridTree(Shape[HybridDrafter]):
    """Two offers: the retrieved trie, and the model's chain or tree. The engine's budget asks the retriever, then the
    model for the requests in which it promises more, and verifies the nodes that pay. Without a budget all are.

    An acceptor whose output for a seed does not depend on the drafts (`Match`) accepts a token chosen by argmax more
    often than a sampled one, so a chain that samples is refused.

    Raises:
        ValueError: `model_shape` is a chain that samples or is empty.
    """

    label = "trie and tree, by expected speed"

    drafter_type = HybridDrafter
    elastic = True

    def __init__(self, trie: Trie, model_shape: Shape[Predictor]) -> None:
        if isinstance(model_shape, Chain) and (model_shape.draw or model_shape.length < 1):
            raise ValueError("the chain of a hybrid picks one token or more: use Chain(length, draw=False)")
        self.trie, self.model_shape = trie, model_shape

    def sources(self, draft: HybridDrafter) -> tuple[Source, ...]:
        """The retriever, and the model."""
        return (draft.retriever, self.trie), (draft.predictor, self.model_shape)

    def grow(self, draft: HybridDrafter, context: Context) -> TokenTree:
        """All drafts of both."""
        trie, depths = self.trie.grow(draft.retriever, context), draft.predictor.max_depths(context)
        which = np.flatnonzero(depths).tolist()
        if not which:
            return trie
        tree = self.model_shape.grow(draft.predictor, replace(context, max_depth=depths).select(which))
        return merge_trees(tree.spread(context.last_tokens, which), trie)

    def observe(self, step: StepResult) -> None:
        """Update the model's shape."""
        self.model_shape.observe(step)
