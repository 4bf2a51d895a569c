"""Drafting with DFlash: a block of tokens in one pass, from the target's hidden states before the last token."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import TokenBuffer
from foretell.draft.cached_states import Roots, Tokens, layout_of
from foretell.draft.parallel_block import BlockPredictor
from foretell.draft.target_states import TargetStates
from foretell.model.cache.layout import Layout
from foretell.model.kernels import DynamicTrees
from foretell.speculator.network.correction_base import Blocks, Nodes
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

    network: DFlash

    def _grow_native(
        self, token: Tokens, root: Roots, states: TargetStates, counts: Sequence[int], trees: DynamicTrees
    ) -> None:
        assert self.network.native is not None
        self.network.native.grow_dynamic_trees(root, *states, counts, trees, self._cache)

    @torch.inference_mode()
    def _read_pending(
        self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]
    ) -> Float[torch.Tensor, "t d"]:
        """Read the next positions of some rows; returns their features."""
        layout = self._reserve_pending(rows, counts)
        _, states = self._pending(rows, texts, counts)
        return self.network.read_target_states(*states, layout, self._cache)

    def _draft(self, rows: Sequence[int], texts: Sequence[TokenBuffer], anchor: Int[torch.Tensor, " n"]) -> Blocks:
        counts = [self._prefixes[row].pending_count for row in rows]
        feature = self._read_pending(rows, texts, counts)[np.cumsum(counts) - 1]
        return self.network.predict(self.network.draft_block(anchor, self._block_layout(rows), self._cache), feature)

    def _scores_after(self, nodes: Nodes) -> tuple[Float[torch.Tensor, "k w"], Float[torch.Tensor, " k"] | None]:
        confidence = self.network.confidence_logits(self._blocks.state_at(nodes), nodes.token)
        return self.network.logits_after(self._blocks, nodes), confidence

    def _block_layout(self, rows: Sequence[int]) -> Layout:
        """The layout of a block after the positions of every row: its slots see these and each other."""
        size, length = self.network.config.block_size, np.array([self._prefixes[row].count for row in rows])
        self._cache.reserve(rows, (length + size).tolist())
        slot = (length[:, None] + np.arange(size)).ravel()
        return layout_of(np.repeat(rows, size), slot, slot, np.repeat(length + size, size))
