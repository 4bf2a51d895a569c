"""Heads on the target's last state as drafter: Medusa's, and blockwise parallel decoding's."""

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor, TopTokens, top_tokens
from foretell.speculator.network.heads import HeadsNetwork


class HeadsDrafter(Predictor):
    """Every head guesses one position from the state that produced the root, whatever the path to it (Cai et al., arXiv
    2401.10774; Stern et al., arXiv 1811.03115).

    So drafting is one small pass per step, and no draft is deeper than there are heads. Nothing is drafted before the
    target has read the prompt.
    """

    label = "heads on the target's last hidden state"

    def __init__(self, network: HeadsNetwork) -> None:
        self.network = network
        self.hidden_layers = network.hidden_layers
        self._states: dict[int, tuple[int, torch.Tensor]] = {}
        """Per row the length of the text whose last token a state produced, and that state."""
        self._logits = torch.zeros(0, 0, 0)
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As many tokens as there are heads, for texts whose last token was produced by a known state."""
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.sequences, strict=True)]
        return np.minimum(super().max_depths(context), np.where(ready, self.network.heads, 0))

    def _ready(self, row: int, length: int) -> bool:
        return row in self._states and self._states[row][0] == length

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """The scores of head `d` for nodes at depth `d`; texts without a state have none."""
        logits, at = self._scores(tree, frontier, context)
        return self.network.to_target_vocab(logits), at

    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The same, without a look at the tokens that it does not draft."""
        logits, at = self._scores(tree, frontier, context)
        return top_tokens(logits, at, count, self._token_of)

    def _scores(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b n"]]:
        """Scores over the drafted tokens, of no more heads than the frontier needs; all are computed when a tree
        begins.
        """
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.sequences, strict=True)]
        if tree.nodes == 1:
            self._logits = self._all([row for row, yes in zip(context.rows, ready, strict=True) if yes])
        depth = np.take_along_axis(tree.depth, frontier, 1)
        least, most = int(depth.min()), min(int(depth.max()), self.network.heads - 1)
        scored = np.array(ready)[:, None] & (tree.depth >= least) & (tree.depth <= most)
        at = (tree.depth - least) * sum(ready) + np.cumsum(ready)[:, None] - 1
        return self._logits[least : most + 1].flatten(0, 1), np.where(scored, at, -1)

    def _all(self, rows: list[int]) -> Float[torch.Tensor, "h k w"]:
        """The scores of all heads for these rows."""
        if not rows:
            return torch.zeros(
                self.network.heads, 0, self.network.target_info.vocab if self._token_of is None else len(self._token_of)
            )
        h = torch.stack([self._states[row][1] for row in rows])
        return self.network(h).transpose(0, 1).contiguous()

    def observe(self, step: StepResult) -> None:
        """Remember the state that produced each text's newest token."""
        rows = np.arange(len(step.context.rows))
        last = step.output.hidden_index[rows, [path[-1] for path in step.paths]]
        states = step.output.hidden_states[0][torch.from_numpy(last).to(step.output.hidden_states[0].device)]
        for i, row in enumerate(step.context.rows):
            if step.new_tokens[i]:
                self._states[row] = step.context.sequences[i].length, states[i]
            else:
                self.release(row)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._states.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Nothing of the last request is needed: every step brings the state that is drafted from."""
        self.release(row)
        return length
