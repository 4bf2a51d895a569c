"""Drafting with DFlash: a block of tokens in one pass, from the target's hidden states before the last token."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.noise import noise_for_kernels
from foretell.core.tree import TokenTree, tree_from_scores
from foretell.draft.cached_states import layout_of
from foretell.draft.parallel_block import BlockPredictor
from foretell.model.kernels import DynamicTrees
from foretell.model.layout import Layout
from foretell.speculator.network.dflash import DFlash


class DFlashDrafter(BlockPredictor):
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

    def _draft(
        self, rows: Sequence[int], texts: Sequence[TokenBuffer], anchor: Int[torch.Tensor, " n"]
    ) -> Float[torch.Tensor, "n p d"]:
        counts = [self._prefixes[row].pending_count for row in rows]
        if sum(counts):
            self._read_pending(rows, texts, counts)
        return self.network.draft_block(anchor, self._block_layout(rows), self._cache)

    def _scores_after(
        self, block: Int[torch.Tensor, " k"], slot: Int[torch.Tensor, " k"], before: Int[torch.Tensor, " k"]
    ) -> tuple[Float[torch.Tensor, "k w"], Float[torch.Tensor, " k"] | None]:
        logits = self.network.add_markov_bias(self._logits[block, slot], before)
        return logits, self.network.confidence_logits(self._states[block, slot], before)

    def _block_layout(self, rows: Sequence[int]) -> Layout:
        """The layout of a block after the positions of every row: its slots see these and each other."""
        size, length = self.network.config.block_size, np.array([self._prefixes[row].length for row in rows])
        self._cache.reserve(rows, (length + size).tolist())
        slot = (length[:, None] + np.arange(size)).ravel()
        return layout_of(np.repeat(rows, size), slot, slot, np.repeat(length + size, size))
