"""One guess after another: the shape of speculative sampling."""

from dataclasses import dataclass

import numpy as np

from foretell.context import Context
from foretell.draft.base import Predictor
from foretell.shape.base import Growth, Shape, level
from foretell.tree import TokenTree


@dataclass(frozen=True)
class Chain(Shape[Predictor]):
    """A chain of up to `length` tokens (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    `draw`: sampled from the drafter's distribution; else its most probable token. `confidence`: a row stops after a token to which the drafter
    itself gives less than this probability (Draft & Verify, arXiv 2309.08168; Hugging Face's `assistant_confidence_threshold`).
    """

    length: int
    draw: bool = True
    confidence: float = 0.0

    needs = Predictor

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"a chain has 0 or more drafted tokens, found {self.length}")
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"the confidence to stop at lies in 0..1, found {self.confidence}")

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A chain per text; rows that stop early have dead nodes at the end."""
        growth = Growth(context)
        going = np.ones(len(context.rows), bool)
        for _ in range(min(self.length, int(context.room.max()))):
            laws = growth.laws(draft)
            parents = growth.frontier[:, 0]
            level(growth, laws, [(0,)], self.draw)
            node = growth.tree.nodes - 1
            going &= growth.tree.live[:, node]
            growth.tree.live[:, node] = going
            if self.confidence > 0:
                for row in np.nonzero(going)[0].tolist():
                    sure = laws.confidence(row, int(parents[row]))[growth.tree.token[row, node]]
                    going[row] = float(sure) >= self.confidence
            if not going.any():
                break
        return growth.done()
