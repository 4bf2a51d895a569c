"""Drafting from distributions of all tokens of a draft that one pass gives."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.noise import LevelNoise
from foretell.core.tree import TokenTree, TreeBounds, TreeSizes
from foretell.draft.base import Frontier, NodeLogits, TopTokens, top_tokens
from foretell.draft.cached_states import CachedStatesPredictor
from foretell.speculator.network.correction_base import Blocks, Nodes
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.p_eagle import PEagle


class BlockPredictor(CachedStatesPredictor):
    """Drafts `depth` tokens in one pass over a cache of the positions that the target has read. All nodes of a depth
    share the distribution of their place (trees from such distributions: arXiv 2604.12989).
    """

    def __init__(self, network: DFlash | PEagle, max_pending: int = 32) -> None:
        super().__init__(network, max_pending)
        self.network = network
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._block: Int[np.ndarray, " b"] = np.zeros(0, np.int64)
        """The block of every request, -1: none."""
        self._blocks = Blocks(torch.zeros(0, 0, 0), torch.zeros(0, 0, 0), torch.zeros(0, 0))
        """What the last pass predicted, over the draft vocabulary."""

    @abstractmethod
    def _draft(self, rows: Sequence[int], texts: Sequence[TokenBuffer], anchor: Int[torch.Tensor, " n"]) -> Blocks:
        """Read the pending positions of some rows, and draft a block for each from its last token `anchor`."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """At most the number of tokens that a block predicts."""
        return np.minimum(super().max_depths(context), self.network.depth)

    def grow_dynamic_tree(self, context: Context, sizes: TreeSizes, bounds: TreeBounds) -> TokenTree | None:
        """Dynamic trees in one call of the CPU kernels, where these run the network."""
        if self.network.native is None:
            return None
        return self._grow(context, (min(sizes[0], self.network.depth), *sizes[1:]), bounds, self.network.slots)

    @torch.inference_mode()
    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier; the first call drafts the block."""
        logits, _, logit_index = self._scores(tree, frontier, context)
        return self.network.to_target_vocab(logits), logit_index

    @torch.inference_mode()
    def top_tokens(
        self, tree: TokenTree, frontier: Frontier, context: Context, count: int, noise: LevelNoise | None = None
    ) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        logits, confidence, logit_index = self._scores(tree, frontier, context)
        best = top_tokens(logits, logit_index, count, self._token_of, noise)
        if confidence is None or not len(logits):
            return best
        shared = torch.sigmoid(confidence.double()).cpu().numpy()[:, None]
        # Rounded as in the kernels, which choose the same tree.
        return TopTokens((best.probability * shared).astype(np.float32).astype(float), best.token, logit_index)

    def _scores(
        self, tree: TokenTree, frontier: Frontier, context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Float[torch.Tensor, " k"] | None, Int[np.ndarray, "b n"]]:
        """Logits over the draft vocabulary after the frontier, and those of the confidence."""
        if tree.nodes == 1:
            self._draft_blocks(context)
        row = np.arange(tree.rows)[:, None]
        depth = tree.depth[row, frontier]
        wanted = tree.valid[row, frontier] & (self._block >= 0)[:, None] & (depth < context.max_depth[:, None])
        batch_row, node = np.nonzero(wanted)[0], frontier[wanted]
        logit_index = np.full(tree.token.shape, -1, np.int64)
        logit_index[batch_row, node] = np.arange(len(node))
        path = _paths(tree, batch_row, node, depth[wanted], context)
        device, slot = self._blocks.logits.device, torch.from_numpy(depth[wanted])
        block, text = torch.from_numpy(self._block[batch_row]), torch.from_numpy(path)
        return *self._scores_after(Nodes(block.to(device), slot.to(device), text.to(device))), logit_index

    def _scores_after(self, nodes: Nodes) -> tuple[Float[torch.Tensor, "k w"], Float[torch.Tensor, " k"] | None]:
        """Logits after some nodes, and those of the confidence, if there is one."""
        return self._blocks.logits_at(nodes), None

    def _draft_blocks(self, context: Context) -> None:
        """Draft a block for every request that may have drafts."""
        which, network = np.flatnonzero(context.max_depth), self.network
        self._block = np.full(len(context.rows), -1)
        self._block[which] = np.arange(len(which))
        rows = [context.rows[i] for i in which.tolist()]
        if not rows:
            empty = torch.zeros(0, network.depth, network.hidden)
            self._blocks = Blocks(empty, torch.zeros(0, network.depth, network.outputs), empty[:, 0])
            return
        self._count_pending(rows, context)
        anchor = torch.tensor([context.last_tokens[i] for i in which.tolist()])
        self._blocks = self._draft(rows, [context.sequences[i] for i in which.tolist()], anchor)


def _paths(
    tree: TokenTree,
    batch_row: Int[np.ndarray, " k"],
    node: Int[np.ndarray, " k"],
    depth: Int[np.ndarray, " k"],
    context: Context,
) -> Int[np.ndarray, "k t"]:
    """For every node the token before the root, and those from the root to the node, then zeros."""
    path = np.zeros((len(node), int(depth.max(initial=0)) + 2), np.int64)
    if len(node):
        path[:, 0] = np.array([text.tokens[-2:][0] for text in context.sequences])[batch_row]
    at = node.copy()
    for level in range(path.shape[1] - 2, -1, -1):
        here = depth >= level
        path[here, level + 1] = tree.token[batch_row[here], at[here]]
        at[here] = tree.parent[batch_row[here], at[here]]
    return path
