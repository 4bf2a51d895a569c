"""Drafting with the whole target over a part of its cache."""

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import CompositeDrafter, Frontier, NodeLogits, TargetCachePredictor
from foretell.draft.cascade import CascadeDrafter
from foretell.draft.draft_model import DraftModel
from foretell.model.run.compact_runner import SparseCacheRunner
from foretell.model.run.halves_runner import UpperHalvesRunner
from foretell.model.run.runner import Runner


class SparseCacheDrafter(CompositeDrafter, TargetCachePredictor):
    """Drafts with the target itself, attending to selected keys and values of its cache (MagicDec, arXiv 2408.11049).

    The text that the target has read is not read again: its keys and values are copied, or the upper halves of all of
    them are read where they lie (QuantSpec, arXiv 2502.10424). `model` reads with the runner: a `DraftModel`, or a
    `CascadeDrafter`, for which a smaller model drafts (TriForce, arXiv 2404.11912).
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

    @property
    def _target(self) -> Runner:
        return self.runner.target

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier, in a pass over the selected keys and values."""
        if tree.nodes == 1:
            self.runner.follow(context)
        return self.model.expand(tree, frontier, context)
