"""Heads on the target's last state as drafter: Medusa's, and blockwise parallel decoding's."""

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.context import Context, Step
from foretell.draft.base import Predictor
from foretell.draft.network.heads import HeadsNetwork
from foretell.tree import TokenTree


class Heads(Predictor):
    """Every head guesses one position from the state that produced the root, whatever the path to it (Cai et al., arXiv 2401.10774; Stern et al.,
    arXiv 1811.03115).

    So drafting is one small pass per step, and no draft is deeper than there are heads. Nothing is drafted before the target has read the prompt.
    """

    def __init__(self, network: HeadsNetwork) -> None:
        self.network = network
        self.taps = network.taps
        self._states: dict[int, tuple[int, torch.Tensor]] = {}
        """Per row the length of the text whose last token a state produced, and that state."""
        self._logits = torch.zeros(0, 0)

    def depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As many tokens as there are heads, for texts whose last token was produced by a known state."""
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.texts, strict=True)]
        return np.minimum(super().depths(context), np.where(ready, self.network.heads, 0))

    def _ready(self, row: int, length: int) -> bool:
        return row in self._states and self._states[row][0] == length

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """The scores of head `d` for nodes at depth `d`; texts without a state have none."""
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.texts, strict=True)]
        if tree.nodes == 1:
            self._logits = self._score([row for row, yes in zip(context.rows, ready, strict=True) if yes])
        first = np.where(ready, np.cumsum(ready) - 1, 0)[:, None] * self.network.heads
        scored = np.array(ready)[:, None] & (tree.depth < self.network.heads)
        return self._logits, np.where(scored, first + tree.depth, -1)

    def _score(self, rows: list[int]) -> Float[torch.Tensor, "k v"]:
        """All heads for these rows, head after head."""
        if not rows:
            return torch.zeros(0, self.network.card.vocab)
        h = torch.stack([self._states[row][1] for row in rows])
        return self.network.spread(self.network(h)).flatten(0, 1)

    def keep(self, step: Step) -> None:
        """Remember the state that produced each text's newest token."""
        rows = np.arange(len(step.context.rows))
        last = step.output.feature_at[rows, [path[-1] for path in step.paths]]
        states = step.output.features[0][torch.from_numpy(last).to(step.output.features[0].device)]
        for i, row in enumerate(step.context.rows):
            if step.decided[i]:
                self._states[row] = step.context.texts[i].length, states[i]
            else:
                self.clear(row)

    def clear(self, row: int) -> None:
        """Forget a row."""
        self._states.pop(row, None)
