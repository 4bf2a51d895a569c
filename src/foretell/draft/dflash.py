"""Drafting with DFlash: a block of tokens in one pass, from the target's hidden states before the last token."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.noise import noise_for_kernels
from foretell.core.tree import TokenTree, tree_from_scores
from foretell.draft.base import TopTokens, top_tokens
from foretell.draft.cached_states import CachedStatesPredictor, layout_of
from foretell.model.kernels import DynamicTrees
from foretell.model.layout import Layout
from foretell.speculator.network.dflash import DFlash


class DFlashDrafter(CachedStatesPredictor):
    """DFlash's layers with their own cache (DFlash, arXiv 2602.06036; trees from its marginals: arXiv 2604.12989).

    The cache holds keys and values of the positions before the last token. Those of a block lie in the slots after and
    are overwritten in the next step. The maximum depth is the number of tokens that a block predicts.

    All nodes of a depth share the distribution of their slot; with a Markov head it depends on the node's token. With a
    confidence head the probabilities of `top_tokens` are multiplied with the share that the target is expected to have
    too.
    """

    label = "a block of masks over the target's hidden states, in one pass"

    def __init__(self, network: DFlash, max_pending: int = 32) -> None:
        super().__init__(network, max_pending)
        self.network = network
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._block: Int[np.ndarray, " b"] = np.zeros(0, np.int64)
        """The block of every request, -1: none."""
        self._states = torch.zeros(0, 0, 0)
        """Inputs of the output head at the predicting slots of every block, [n p d]."""
        self._logits = torch.zeros(0, 0, 0)
        """Their logits over the draft vocabulary, without the Markov head."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """At most the number of tokens that a block predicts."""
        return np.minimum(super().max_depths(context), self.network.depth)

    @torch.inference_mode()
    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Logits after the frontier; the first call drafts the block."""
        logits, _, logit_index = self._scores(tree, frontier, context)
        return self.network.to_target_vocab(logits), logit_index

    @torch.inference_mode()
    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        logits, confidence, logit_index = self._scores(tree, frontier, context)
        found = top_tokens(logits, logit_index, count, self._token_of)
        if confidence is None or not len(logits):
            return found
        shared = torch.sigmoid(confidence.double()).cpu().numpy()[:, None]
        # Rounded as in the kernels, which choose the same tree.
        return TopTokens((found.probability * shared).astype(np.float32).astype(float), found.token, logit_index)

    def grow_dynamic_tree(
        self, context: Context, sizes: tuple[int, int, int], bounds: tuple[float, float]
    ) -> TokenTree | None:
        """DynamicTrees in one call of the CPU kernels, where these run the network."""
        which = np.flatnonzero(context.max_depth).tolist()
        if self.network.native is None or not which:
            return None
        rows = [context.rows[i] for i in which]
        self._restore(rows)
        counts = [self._prefixes[row].pending_count for row in rows]
        _, states = self._take_pending(rows, [context.sequences[i] for i in which], counts)
        length = [self._prefixes[row].length for row in rows]
        self._cache.reserve(rows, [n + self.network.config.block_size for n in length])
        sizes = min(sizes[0], self.network.depth), *sizes[1:]
        noise = noise_for_kernels(context.select(which), sizes[0])
        trees = DynamicTrees(context.max_depth[which], sizes, bounds, rows, length, noise)
        roots = np.array([context.last_tokens[i] for i in which])
        hidden_states = [h if h.dtype == torch.float32 else h.float() for h in states.hidden_states]
        self.network.native.grow_dynamic_trees(roots, hidden_states, states.place, counts, trees, self._cache)
        return tree_from_scores(context.last_tokens, which, trees.token, trees.parent, trees.score, trees.count)

    @torch.inference_mode()
    def _read_pending(self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]) -> None:
        layout = self._reserve_pending(rows, counts)
        _, states = self._take_pending(rows, texts, counts)
        self.network.read_target_states(*states, layout, self._cache)

    def _scores(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Float[torch.Tensor, " k"] | None, Int[np.ndarray, "b n"]]:
        """Logits over the draft vocabulary after the frontier, and those of the confidence head."""
        if tree.nodes == 1:
            self._draft_blocks(context)
        row = np.arange(tree.rows)[:, None]
        depth = tree.depth[row, frontier]
        wanted = tree.valid[row, frontier] & (self._block >= 0)[:, None] & (depth < context.max_depth[:, None])
        batch_row, node = np.nonzero(wanted)[0], frontier[wanted]
        logit_index = np.full(tree.token.shape, -1, np.int64)
        logit_index[batch_row, node] = np.arange(len(node))
        device = self._logits.device
        block, slot, before = (
            torch.from_numpy(part).to(device)
            for part in (self._block[batch_row], depth[wanted], tree.token[batch_row, node])
        )
        logits = self.network.add_markov_bias(self._logits[block, slot], before)
        return logits, self.network.confidence_logits(self._states[block, slot], before), logit_index

    def _draft_blocks(self, context: Context) -> None:
        """Read the pending positions and draft a block for every request that may have drafts."""
        which = np.flatnonzero(context.max_depth)
        self._block = np.full(len(context.rows), -1)
        self._block[which] = np.arange(len(which))
        rows = [context.rows[i] for i in which.tolist()]
        if not rows:
            self._states = self._cache.k.new_zeros(0, self.network.depth, self.network.hidden, dtype=self.network.dtype)
            self._logits = self._cache.k.new_zeros(0, self.network.depth, self.network.outputs)
            return
        self._restore(rows)
        counts = [self._prefixes[row].pending_count for row in rows]
        if sum(counts):
            self._read_pending(rows, [context.sequences[i] for i in which.tolist()], counts)
        anchor = torch.tensor([context.last_tokens[i] for i in which.tolist()])
        self._states = self.network.draft_block(anchor, self._block_layout(rows), self._cache)
        self._logits = self.network.compute_logits(self._states)

    def _block_layout(self, rows: Sequence[int]) -> Layout:
        """The layout of a block after the positions of every row: its slots see these and each other."""
        size, length = self.network.config.block_size, np.array([self._prefixes[row].length for row in rows])
        self._cache.reserve(rows, (length + size).tolist())
        slot = (length[:, None] + np.arange(size)).ravel()
        return layout_of(np.repeat(rows, size), slot, slot, np.repeat(length + size, size))
