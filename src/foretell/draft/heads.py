"""Drafting with heads on the target's last hidden state: Medusa's, and blockwise parallel decoding's."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.draft.base import Frontier, NodeLogits, Predictor, RootStatePredictor
from foretell.speculator.network.heads import HeadsNetwork


class HeadsDrafter(RootStatePredictor):
    """Every head predicts one position from the state that produced the root, independent of the path (Cai et al.,
    arXiv 2401.10774; Stern et al., arXiv 1811.03115).

    Drafting is one call of the network per step, and the maximum depth is the number of heads. There is no draft before
    the target has read the prompt.
    """

    label = "heads on the target's last hidden state"

    network: HeadsNetwork

    def __init__(self, network: HeadsNetwork) -> None:
        super().__init__(network)
        self._logits = torch.zeros(0, 0, 0)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The number of heads, for requests whose root state is known."""
        return np.minimum(super().max_depths(context), self.network.heads)

    def _scores(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits over the draft vocabulary, of the heads that the frontier needs; a new tree computes those of all
        heads.
        """
        ready = self._ready(context)
        if tree.nodes == 1:
            self._logits = self._compute_all([text for text, yes in zip(context.sequences, ready, strict=True) if yes])
        return scores_by_depth(self._logits, tree, frontier, ready)

    def _compute_all(self, texts: Sequence[TokenBuffer]) -> Float[torch.Tensor, "h k w"]:
        """The logits of all heads for these sequences."""
        if not texts:
            return self._no_logits().expand(self.network.heads, 0, -1)
        h = torch.stack([self._root_states[text][1] for text in texts])
        return self.network(h).transpose(0, 1).contiguous()


def scores_by_depth(
    logits: Float[torch.Tensor, "l r w"], tree: TokenTree, frontier: Frontier, scored: Sequence[bool]
) -> NodeLogits:
    """Scores of a frontier where they depend on the depth alone, and the row of every node (-1: none).

    `logits`: by depth, for the requests that are scored.
    """
    depth = np.take_along_axis(tree.depth, frontier, 1)
    least, most = int(depth.min()), min(int(depth.max()), len(logits) - 1)
    known = np.array(scored)[:, None] & (tree.depth >= least) & (tree.depth <= most)
    index = (tree.depth - least) * sum(scored) + np.cumsum(scored)[:, None] - 1
    return logits[least : most + 1].flatten(0, 1), np.where(known, index, -1)


class OnePassPredictor(Predictor):
    """Predicts all depths of a draft in one pass; all nodes of a depth share a distribution."""

    depth: int
    _logits = torch.zeros(0, 0, 0)

    @abstractmethod
    def _predict(self, context: Context) -> Float[torch.Tensor, "l r v"]:
        """Logits of all depths for the requests that may have drafts."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """At most the number of tokens that a pass predicts."""
        return np.minimum(super().max_depths(context), self.depth)

    @torch.inference_mode()
    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """The logits of depth `d` for nodes at depth `d`; a new tree computes those of all depths."""
        if tree.nodes == 1:
            self._logits = self._predict(context)
        return scores_by_depth(self._logits, tree, frontier, [bool(depth) for depth in context.max_depth])
