"""Several predictors whose trees are merged: the merge-based speculation of SpecInfer."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from foretell.core.context import Context
from foretell.draft.base import CompositeDrafter, Predictor


class DrafterUnion(CompositeDrafter):
    """Predictors that draft for one tree (the boost-tuned models of SpecInfer, arXiv 2305.09781)."""

    label = "several draft models, merged"

    def __init__(self, drafters: Sequence[Predictor]) -> None:
        super().__init__(drafters)
        self.drafters = tuple(drafters)
        self.max_context = min(d.max_context for d in drafters)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The least depth of all drafters."""
        return np.stack([d.max_depths(context) for d in self.drafters]).min(0)
