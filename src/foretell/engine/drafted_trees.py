"""The trees of a step while they are put together: drafted by a method, continued by predicted outputs, and pruned."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

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
    rows: list[int]
    """Their rows."""
    tree: TokenTree
    depths: list[int] = field(default_factory=list)
    """How deep the method might draft for each request."""
    seconds: float = 0.0
    """Time that the method took."""
    own: TokenTree | None = None
    """The tree as the method drafted it; None: the same."""
    predicted: Float[np.ndarray, "b n"] | None = None
    """Probability of acceptance of nodes that no method drafted, 0 for others; None: there are none."""

    @property
    def drafts(self) -> Bool[np.ndarray, "b n"]:
        """All drafts: all nodes but the roots."""
        out = self.tree.valid.copy()
        out[:, 0] = False
        return out

    def removable(self) -> Bool[np.ndarray, "b n"]:
        """Drafts that may be left out whatever was sampled: all, if the acceptor keeps the seed's text, and else those
        that a predicted output added.
        """
        out = self.drafts
        if self.bound is not None and not self.bound.method.accept.same_seed:
            out[:, : (self.own or self.tree).nodes] = False
        return out

    def add_predicted(self, continuations: Sequence[Continuation]) -> None:
        """Add a continuation to each tree."""
        if any(c.tokens for c in continuations):
            self.own, before = self.tree, self.predicted
            self.tree, self.predicted = add_continuations(self.tree, continuations)
            if before is not None:
                self.predicted[:, : before.shape[1]] = np.maximum(self.predicted[:, : before.shape[1]], before)
