"""Drafting with the target itself, of whose neurons a part is read, in the target's cache."""

import numpy as np
import torch
from jaxtyping import Bool, Int

from foretell.core.context import Context, StepState
from foretell.core.tree import TokenTree
from foretell.draft.base import Frontier, NodeLogits, Predictor
from foretell.draft.early_exit import frontier_nodes
from foretell.model.run.compact_runner import check_whole
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import with_ancestors
from foretell.model.run.runner import DraftsInCache, Runner, required

_NO_ENGINE = "a drafter with a part of the target's neurons works in an engine only: it shares a cache"


class SparseTargetDrafter(Predictor):
    """Drafts with a network that shares the target's cache and has keys and values of the same sizes: the target with
    a part of its neurons (CATS, arXiv 2404.08763; Deja Vu, arXiv 2310.17157; MatFormer, arXiv 2310.07707).

    The text that the target has read is not read again. Keys and values of drafts are written to the target's cache,
    where its pass replaces them. There is no draft before the target has read the prompt.
    """

    label = "target with a part of its neurons"

    def __init__(self, network: Network) -> None:
        self.network = network
        self._runner: Runner | None = None
        self._cache: DraftsInCache | None = None
        """The target, whose cache takes the drafts."""
        self._read = StepState[Bool[np.ndarray, "b n"]]()
        """Nodes of the tree that grows which the network has read."""

    def attach(self, runner: Runner) -> None:
        """Draft in the cache of this runner.

        Raises:
            ValueError: it keeps a part of the text's keys and values only, or has no cache for another network.
        """
        check_whole(runner)
        self._cache = required(runner, DraftsInCache, "a draft in the target's cache needs a model of the own decoder")
        self._runner = runner

    @property
    def _target(self) -> Runner:
        if self._runner is None:
            raise ValueError(_NO_ENGINE)
        return self._runner

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As `Drafter.max_depths`; 0 for the first token of an answer, and where the target is behind."""
        pairs = zip(context.rows, context.sequences, strict=True)
        ready = [s.length > s.prompt_length and self._target.length(row) == s.length - 1 for row, s in pairs]
        return np.where(ready, super().max_depths(context), 0)

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier; none for requests at their maximum depth."""
        wanted = frontier_nodes(tree, frontier, context)
        if not wanted.any():
            return torch.zeros(0, self._target.vocab), np.full(wanted.shape, -1)
        read = np.zeros(wanted.shape, bool)
        if tree.nodes > 1:
            known = self._read.of(context, read[:, :0])
            read[:, : known.shape[1]] = known
        active = (with_ancestors(tree, wanted) & ~read) | wanted
        if self._cache is None:
            raise ValueError(_NO_ENGINE)
        output = self._cache.forward_draft(self.network, context.rows, tree, active, wanted)
        self._read.put(context, read | active)
        return output.logits, output.logit_index
