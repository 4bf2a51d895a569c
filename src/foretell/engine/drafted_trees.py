"""The trees of a step while they are put together: drafted by a method, continued by predicted outputs, and pruned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from foretell.core.tree import TokenTree
from foretell.draft.base import Continuation
from foretell.draft.prediction import add_continuations
from foretell.engine.method import BoundMethod

NO_LIMIT = 1 << 30
"""A depth that limits nothing."""


@dataclass
class DraftedTrees:
    """Trees of some requests of a step, with a prefix of 1, before they are pruned."""

    bound: BoundMethod | None
    """The method that drafted them; None: there are only predicted outputs and tokens that constraints force."""
    indices: list[int]
    """Of the requests in the step."""
    tree: TokenTree
    removable: bool = False
    """Whether drafts may be left out: the acceptor keeps the seed's text, and scores are chances of acceptance."""
    predicted: Float[np.ndarray, "b n"] | None = None
    """Probability of acceptance of nodes that no method drafted, 0 for others; None: there are none."""

    def chances(self) -> list[list[float]]:
        """Probability of acceptance of every node."""
        known = [p for p in (self.tree.score, self.predicted) if p is not None]
        out: list[list[float]] = (known[0] if len(known) == 1 else np.maximum(*known)).tolist()
        return out

    def add_predicted(self, continuations: Sequence[Continuation]) -> None:
        """Add a continuation to each tree."""
        if any(c.tokens for c in continuations):
            before = self.predicted
            self.tree, self.predicted = add_continuations(self.tree, continuations)
            if before is not None:
                self.predicted[:, : before.shape[1]] = np.maximum(self.predicted[:, : before.shape[1]], before)


class Draft(NamedTuple):
    """A drafted node: its chance times what a token of its request is worth, and its place."""

    value: float
    part: int
    row: int
    node: int


def removable_drafts(parts: Sequence[DraftedTrees], weights: Sequence[float]) -> list[Draft]:
    """All drafts that may be left out, by falling value. `weights`: what a token of each request is worth."""
    drafts = list[Draft]()
    for p, part in enumerate(parts):
        if part.removable and part.tree.nodes > 1:
            pairs = zip(part.indices, part.chances(), part.tree.valid.tolist(), strict=True)
            drafts += [
                Draft(weights[i] * chance, p, row, node)
                for row, (i, chances, valid) in enumerate(pairs)
                for node, chance in enumerate(chances)
                if node and valid[node]
            ]
    # Stable: of equals the earlier ones stay, so that a node's parent is kept.
    return sorted(drafts, key=lambda draft: -draft.value)


def leave_out(parts: Sequence[DraftedTrees], drafts: Sequence[Draft]) -> None:
    """Remove drafts from their trees."""
    for p, part in enumerate(parts):
        left = [(draft.row, draft.node) for draft in drafts if draft.part == p]
        if left:
            valid = part.tree.valid.copy()
            rows, nodes = zip(*left, strict=True)
            valid[rows, nodes] = False
            part.tree = replace(part.tree, valid=valid)
