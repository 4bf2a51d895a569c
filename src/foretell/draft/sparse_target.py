"""Drafting with the target itself in its cache: with a part of its neurons, or with an adapter over noise."""

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.context import Context, StepState
from foretell.core.tree import NodeMask, TokenTree, tree_from_lists
from foretell.draft.base import Frontier, NodeLogits, TargetCachePredictor, in_engine
from foretell.draft.early_exit import frontier_nodes
from foretell.draft.heads import OnePassPredictor
from foretell.model.run.compact_runner import check_whole
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import with_ancestors
from foretell.model.run.runner import DraftsInCache, Runner, required


class SparseTargetDrafter(TargetCachePredictor):
    """Drafts with a network that shares the target's cache and has keys and values of the same sizes: the target with
    a part of its neurons (CATS, arXiv 2404.08763; Deja Vu, arXiv 2310.17157; MatFormer, arXiv 2310.07707).

    The text that the target has read is not read again. Keys and values of drafts are written to the target's cache,
    where its pass replaces them.
    """

    label = "target with a part of its neurons"

    def __init__(self, network: Network) -> None:
        self.network = network
        self._cache: DraftsInCache | None = None
        """The target, whose cache takes the drafts."""
        self._read = StepState[NodeMask]()
        """Nodes of the tree that grows which the network has read."""

    def attach(self, runner: Runner) -> None:
        """Draft in the cache of this runner.

        Raises:
            ValueError: it keeps a part of the text's keys and values only, or has no cache for another network.
        """
        check_whole(runner)
        self._cache = required(runner, DraftsInCache, "a draft in the target's cache needs a model of the own decoder")
        self._runner = runner

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
        scores = self._forward(self.network, context, tree, active, wanted)
        self._read.put(context, read | active)
        return scores

    def _forward(
        self, network: Network, context: Context, tree: TokenTree, read: NodeMask, wanted: NodeMask
    ) -> NodeLogits:
        output = in_engine(self._cache).forward_draft(network, context.rows, tree, read, wanted)
        return output.logits, output.logit_index


class UnoDrafter(OnePassPredictor, SparseTargetDrafter):
    """The target drafts with an adapter (UNO, arXiv 2609.04010): it reads the last token, which predicts the next one,
    and with the adapter `depth - 1` random tokens after it, each of which predicts one of the tokens that follow.

    `tokens`: random ones are below it.
    """

    label = "target with an adapter over random tokens, in one pass"

    def __init__(self, network: Network, target: Network, depth: int, tokens: int) -> None:
        super().__init__(network)
        self.depth, self._seed, self._tokens = depth, target, tokens

    def _predict(self, context: Context) -> Float[torch.Tensor, "l r v"]:
        """Logits of all depths. The random tokens depend on the length of the text and its last token."""
        context = context.select(np.flatnonzero(context.max_depth).tolist())
        if not context.rows:
            return torch.zeros(self.depth, 0, self._target.vocab)
        chains, count = [[last] for last in context.last_tokens], self.depth - 1
        for chain, text in zip(chains, context.sequences, strict=True):
            chain += np.random.default_rng((text.length, *chain)).integers(1, self._tokens, count).tolist()
        tree = tree_from_lists(chains, [list(range(-1, count))] * len(chains))
        seed, parts = np.arange(self.depth)[None] == 0, list[torch.Tensor]()
        for network, part in ((self._seed, seed), (self.network, ~seed)):
            marks = np.repeat(part, len(chains), 0)
            logits, index = self._forward(network, context, tree, marks, marks)
            parts.append(logits[torch.from_numpy(index[:, part[0]].T.copy()).to(logits.device)])
        return torch.cat(parts)
