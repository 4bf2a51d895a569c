"""The average of several predictors: the merged speculation of SpecInfer."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import CompositeDrafter, Frontier, NodeLogits, Predictor


class MixtureDrafter(CompositeDrafter, Predictor):
    """Averages the distributions of several drafters (the union of boost-tuned models in SpecInfer, arXiv 2305.09781,
    as one distribution).

    A sample of the average is a sample of one drafter chosen at random. The average is one `q` per node, so every
    acceptor stays exact.
    """

    label = "several draft models, averaged"

    def __init__(self, drafters: Sequence[Predictor], weights: Sequence[float] | None = None) -> None:
        if not drafters:
            raise ValueError("a mix needs at least one drafter")
        weights = [1.0] * len(drafters) if weights is None else weights
        if len(weights) != len(drafters) or min(weights) <= 0:
            raise ValueError(
                f"a mix needs one positive weight per drafter: {len(drafters)} drafters, weights {list(weights)}"
            )
        super().__init__(drafters)
        self.drafters = tuple(drafters)
        self._log_weights = torch.tensor([w / sum(weights) for w in weights]).log()
        self.max_context = min(d.max_context for d in drafters)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The least depth of all drafters."""
        return np.stack([d.max_depths(context) for d in self.drafters]).min(0)

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Log of the averaged distribution after the frontier."""
        parts = [d.expand(tree, frontier, context) for d in self.drafters]
        logit_index = parts[0][1]
        rows, nodes = np.nonzero(logit_index >= 0)
        order = logit_index[rows, nodes]
        scores = [torch.log_softmax(logits[torch.from_numpy(where[rows, nodes])], -1) for logits, where in parts]
        mixed = torch.logsumexp(torch.stack(scores) + self._log_weights.to(scores[0])[:, None, None], 0)
        out = torch.empty_like(mixed)
        out[torch.from_numpy(order)] = mixed
        return out, logit_index
