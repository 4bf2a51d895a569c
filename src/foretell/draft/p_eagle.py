"""Drafting with P-EAGLE: all tokens in one pass, from the target's hidden states and masks."""

from collections.abc import Sequence

import torch
from jaxtyping import Int

from foretell.core.context import TokenBuffer
from foretell.draft.cached_states import Roots, Tokens
from foretell.draft.eagle import store_states
from foretell.draft.parallel_block import BlockPredictor
from foretell.draft.target_states import TargetStates
from foretell.model.kernels import DynamicTrees
from foretell.speculator.network.correction_base import Blocks
from foretell.speculator.network.p_eagle import PEagle


class PEagleDrafter(BlockPredictor):
    """P-EAGLE's layers with their own cache (arXiv 2602.01469).

    The cache holds keys and values of the positions that the target has read, as EAGLE's does. Those of the masks lie
    in the slots after and are overwritten in the next step.
    """

    label = "EAGLE's layers over masks, in one pass"

    network: PEagle

    def _grow_native(
        self, token: Tokens, root: Roots, states: TargetStates, counts: Sequence[int], trees: DynamicTrees
    ) -> None:
        assert self.network.native is not None
        self.network.native.grow_dynamic_trees(token, *states, counts, trees, self._cache, self.network.slots)

    @torch.inference_mode()
    def _read_pending(self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]) -> None:
        layout = self._reserve_pending(rows, counts)
        store_states(self.network, *self._pending(rows, texts, counts), layout, self._cache)

    def _draft(self, rows: Sequence[int], texts: Sequence[TokenBuffer], anchor: Int[torch.Tensor, " n"]) -> Blocks:
        counts, masks = [self._prefixes[row].pending_count for row in rows], self.network.slots
        layout = self._reserve_pending(rows, [count + masks for count in counts])
        token, states = self._pending(rows, texts, counts)
        order, last = _order(counts, masks)
        index = torch.from_numpy(states.place).to(states.hidden_states[0].device)
        features = torch.cat([state[index] for state in states.hidden_states], -1)
        out = self.network.draft(torch.from_numpy(token), features, len(rows), order, layout, self._cache)
        states = self.network.head_input(out[last])
        return Blocks(states, self.network.compute_logits(states), states[:, 0])


def _order(counts: Sequence[int], masks: int) -> tuple[Int[torch.Tensor, " u"], Int[torch.Tensor, "n p"]]:
    """Where the positions of rows, each followed by its masks, are in a list of all positions and then all masks; and
    where every row's last position and its masks are in the former.
    """
    order, last, begin, total = list[int](), list[list[int]](), 0, sum(counts)
    for i, count in enumerate(counts):
        last.append(list(range(len(order) + count - 1, len(order) + count + masks)))
        order += [*range(begin, begin + count), *range(total + i * masks, total + (i + 1) * masks)]
        begin += count
    return torch.tensor(order), torch.tensor(last)
