"""Drafting with recurrent speculators: every node has a state, from its parent's state and its token."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context
from foretell.core.tree import TokenTree, TreeBounds, TreeSizes, tree_from_scores
from foretell.distributions.coupling import kernel_noise
from foretell.draft.base import Frontier, NodeLogits, RootStatePredictor
from foretell.model.kernels import DynamicTrees
from foretell.speculator.network.mlp_speculator import MLPSpeculator
from foretell.speculator.network.redrafter import ReDrafter
from foretell.utils.inference import in_inference_mode


class MLPSpeculatorDrafter(RootStatePredictor):
    """Stage `i` gives the logits after nodes at depth `i` (Wertheimer et al., arXiv 2404.19124).

    The first stage starts from the target's state that produced the root; without one there is no draft. The maximum
    depth is the number of stages.
    """

    label = "recurrent MLP on the target's last hidden state"

    network: MLPSpeculator | ReDrafter

    def __init__(self, network: MLPSpeculator | ReDrafter) -> None:
        super().__init__(network)
        self._states = torch.zeros(0, 0)
        """States of the nodes expanded in this step, in the order of their expansion."""
        self._state_index: Int[np.ndarray, "b n"] = np.zeros((0, 0), np.int64)
        """The row of every node in `_states`; -1: none."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The number of stages, for requests whose root state is known."""
        return np.minimum(super().max_depths(context), self.network.stages)

    def _prepare_states(self, hidden_states: Sequence[Float[torch.Tensor, "b d"]]) -> Float[torch.Tensor, "b e"]:
        """The states before the first stage."""
        return self.network.initial_state(hidden_states)

    @in_inference_mode
    def grow_dynamic_tree(self, context: Context, sizes: TreeSizes, bounds: TreeBounds) -> TokenTree | None:
        """Dynamic trees in one call of the CPU kernels, where these run the network."""
        kernels, (depth, width, budget) = self.network.native, sizes
        pairs = zip(context.max_depth.tolist(), self._ready(context), strict=True)
        which = [i for i, (most, ready) in enumerate(pairs) if most > 0 and ready]
        if kernels is None or self.network.softcap or not which:
            return None
        part, sizes = context.select(which), (min(depth, self.network.stages), width, budget)
        states = [self._root_states[text][1] for text in part.sequences]
        start = states[0][None] if len(states) == 1 else torch.stack(states)
        trees = DynamicTrees(part.max_depth, sizes, bounds, noise=kernel_noise(part, sizes[0]))
        kernels.grow_dynamic_trees(start, part.last_tokens, trees)
        return tree_from_scores(context.last_tokens, which, trees.token, trees.parent, trees.score, trees.count)

    def _scores(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits over the draft vocabulary: one call per stage for all requests."""
        if tree.nodes == 1:
            return self._score_roots(tree, context)
        row = np.arange(tree.rows)[:, None]
        parent = self._state_index[row, tree.parent[row, frontier]]
        stage = tree.depth[row, frontier]
        most = np.minimum(context.max_depth, self.network.stages)[:, None]
        wanted = tree.valid[row, frontier] & (stage < most) & (parent >= 0)
        logit_index = np.full(tree.token.shape, -1, np.int64)
        have, self._state_index = self._state_index, logit_index.copy()
        self._state_index[:, : have.shape[1]] = have
        stage_logits = list[torch.Tensor]()
        for each in sorted(set(stage[wanted].tolist())):
            in_stage = wanted & (stage == each)
            which, node = np.nonzero(in_stage)[0], frontier[in_stage]
            state = self._states[torch.from_numpy(parent[in_stage]).to(self._states.device)]
            logits, index = self._score(state, tree.token[which, node], each)
            logit_index[which, node] = np.arange(len(node)) + sum(map(len, stage_logits))
            self._state_index[which, node] = index
            stage_logits.append(logits)
        if not stage_logits:
            return self._no_logits(), logit_index
        return stage_logits[0] if len(stage_logits) == 1 else torch.cat(stage_logits), logit_index

    def _score_roots(
        self, tree: TokenTree, context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b 1"]]:
        """Logits after the roots, from the target's states; none where the state is not known."""
        ready = self._ready(context)
        self._state_index = np.where(ready, np.cumsum(ready) - 1, -1)[:, None]
        self._states = torch.zeros(0, 0)
        if not any(ready):
            return self._no_logits(), self._state_index
        texts = [text for text, yes in zip(context.sequences, ready, strict=True) if yes]
        start = torch.stack([self._root_states[text][1] for text in texts])
        return self._score(start, tree.token[ready, 0], 0)[0], self._state_index

    def _score(
        self, state: Float[torch.Tensor, "k e"], token: Int[np.ndarray, " k"], stage: int
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, " k"]]:
        """Logits after nodes of these parents' states and these tokens, and the rows of their own states."""
        new, logits = self.network.draft_step(state, torch.from_numpy(token).to(state.device), stage)
        index = np.arange(len(new)) + len(self._states)
        self._states = torch.cat([self._states, new]) if len(self._states) else new
        return logits, index


class ReDrafterDrafter(MLPSpeculatorDrafter):
    """A recurrent network beside the target's last hidden state; all steps share their weights (ReDrafter, arXiv
    2403.09919).
    """

    label = "recurrent network beside the target's last hidden state"
