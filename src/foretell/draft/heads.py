"""Drafting with heads on the target's last hidden state: Medusa's, and blockwise parallel decoding's."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.noise import LevelNoise
from foretell.core.tree import TokenTree
from foretell.draft.base import RootStatePredictor, TopTokens, top_tokens
from foretell.speculator.network.heads import HeadsNetwork


class HeadsDrafter(RootStatePredictor):
    """Every head predicts one position from the state that produced the root, independent of the path (Cai et al.,
    arXiv 2401.10774; Stern et al., arXiv 1811.03115).

    Drafting is one call of the network per step, and the maximum depth is the number of heads. There is no draft before
    the target has read the prompt.
    """

    label = "heads on the target's last hidden state"

    def __init__(self, network: HeadsNetwork) -> None:
        super().__init__()
        self.network, self.hidden_layers = network, network.hidden_layers
        self._logits = torch.zeros(0, 0, 0)
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The number of heads, for requests whose root state is known."""
        return np.minimum(super().max_depths(context), np.where(self._ready(context), self.network.heads, 0))

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """The logits of head `d` for nodes at depth `d`; none for requests without a root state."""
        logits, logit_index = self._scores(tree, frontier, context)
        return self.network.to_target_vocab(logits), logit_index

    def top_tokens(
        self,
        tree: TokenTree,
        frontier: Int[np.ndarray, "b f"],
        context: Context,
        count: int,
        noise: LevelNoise | None = None,
    ) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        logits, logit_index = self._scores(tree, frontier, context)
        return top_tokens(logits, logit_index, count, self._token_of, noise)

    def _scores(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b n"]]:
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
            return torch.zeros(
                self.network.heads, 0, self.network.target_info.vocab if self._token_of is None else len(self._token_of)
            )
        h = torch.stack([self._root_states[text][1] for text in texts])
        return self.network(h).transpose(0, 1).contiguous()


def scores_by_depth(
    logits: Float[torch.Tensor, "l r w"], tree: TokenTree, frontier: Int[np.ndarray, "b f"], scored: Sequence[bool]
) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b n"]]:
    """Scores of a frontier where they depend on the depth alone, and the row of every node (-1: none).

    `logits`: by depth, for the requests that are scored.
    """
    depth = np.take_along_axis(tree.depth, frontier, 1)
    least, most = int(depth.min()), min(int(depth.max()), len(logits) - 1)
    known = np.array(scored)[:, None] & (tree.depth >= least) & (tree.depth <= most)
    index = (tree.depth - least) * sum(scored) + np.cumsum(scored)[:, None] - 1
    return logits[least : most + 1].flatten(0, 1), np.where(known, index, -1)
