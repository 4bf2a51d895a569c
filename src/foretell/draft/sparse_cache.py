"""Drafting with the whole target over a part of its cache."""

import numpy as np
from jaxtyping import Int

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import CompositeDrafter, Frontier, NodeLogits, Predictor
from foretell.draft.cascade import CascadeDrafter
from foretell.draft.draft_model import DraftModel
from foretell.model.run.compact_runner import SparseCacheRunner
from foretell.model.run.halves_runner import UpperHalvesRunner
from foretell.model.run.runner import Runner


class SparseCacheDrafter(CompositeDrafter, Predictor):
    """Drafts with the target itself, attending to selected keys and values of its cache (MagicDec, arXiv 2408.11049).

    The text that the target has read is not read again: its keys and values are copied, or the upper halves of all of
    them are read where they lie (QuantSpec, arXiv 2502.10424). There is no draft before the
    target has read the prompt. `model` reads with the runner: a `DraftModel`, or a `CascadeDrafter`, for which a
    smaller model drafts (TriForce, arXiv 2404.11912).
    """

    label = "target over a part of its cache"

    def __init__(self, model: DraftModel | CascadeDrafter) -> None:
        runner = model.runner
        assert isinstance(runner, SparseCacheRunner | UpperHalvesRunner)
        super().__init__([model])
        self.runner, self.model, self.max_context = runner, model, model.max_context

    def attach(self, runner: Runner) -> None:
        """Select from the cache of this runner."""
        self.runner.attach(runner)

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As `Drafter.max_depths`; 0 for the first token of an answer, and where the target is behind."""
        pairs = zip(context.rows, context.sequences, strict=True)
        ready = [s.length > s.prompt_length and self.runner.target.length(r) == s.length - 1 for r, s in pairs]
        return np.where(ready, super().max_depths(context), 0)

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier, in a pass over the selected keys and values."""
        if tree.nodes == 1:
            self.runner.follow(context)
        return self.model.expand(tree, frontier, context)
