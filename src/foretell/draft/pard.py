"""Drafting with PARD: a draft model reads mask tokens behind the sequence and predicts all of them in one pass."""

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.draft.base import Frontier, NodeLogits
from foretell.draft.draft_model import OwnCache, read_backlog, unread_tokens
from foretell.draft.heads import scores_by_depth
from foretell.model.run.runner import Runner


class PardDrafter(OwnCache):
    """A draft model with mask tokens (PARD, arXiv 2504.18583).

    A pass reads the tokens that the draft model has not read yet and a chain of masks behind them. Keys and values of
    the tokens are kept, those of the masks are not. All nodes of a depth share a distribution.
    """

    label = "draft model over mask tokens, in one pass"

    def __init__(self, runner: Runner, mask_token: int, depth: int, chunk: int = 512) -> None:
        self.runner, self.depth, self._mask_token = runner, depth, mask_token
        self.max_context = runner.context - depth
        self._chunk = chunk
        self._logits = torch.zeros(0, 0, 0)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """At most the number of tokens that a pass predicts."""
        return np.minimum(super().max_depths(context), self.depth)

    @torch.inference_mode()
    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """The logits of depth `d` for nodes at depth `d`; a new tree computes those of all depths."""
        if tree.nodes == 1:
            self._logits = self._predict(context)
        return scores_by_depth(self._logits, tree, frontier, [bool(depth) for depth in context.max_depth])

    def _predict(self, context: Context) -> Float[torch.Tensor, "l r v"]:
        """Logits of all depths for the requests that may have drafts."""
        active = np.flatnonzero(context.max_depth)
        if not len(active):
            return torch.zeros(self.depth, 0, self.runner.vocab)
        part, masks = context.select(active.tolist()), self.depth - 1
        for row, text in zip(part.rows, part.sequences, strict=True):
            # A step that failed proposes again: its last token was read.
            self.runner.truncate(row, min(self.runner.length(row), text.length - 1))
        read_backlog(self.runner, part, self._chunk)
        chains = tree_from_lists(
            [[last, *[self._mask_token] * masks] for last in part.last_tokens], [list(range(-1, masks))] * len(active)
        )
        full = chains.with_prefix(unread_tokens(self.runner, part))
        last = full.prefix_length[:, None] - 1
        place = last + np.arange(masks + 1)
        scored = np.zeros(full.token.shape, bool)
        np.put_along_axis(scored, place, True, 1)
        output = self.runner.forward(part.rows, full, active=full.valid, scored=scored)
        for row, length in zip(part.rows, full.prefix_length.tolist(), strict=True):
            self.runner.commit(row, range(length))
        index = torch.from_numpy(np.take_along_axis(output.logit_index, place, 1).T.copy())
        return output.logits[index.to(output.logits.device)]
