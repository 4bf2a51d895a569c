"""Drafting with a masked diffusion model: a block of masks behind the sequence is predicted in one pass or a few."""

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context
from foretell.draft.heads import OnePassPredictor
from foretell.model.diffusion.attention import SequenceStore
from foretell.model.diffusion.predictor import MaskPredictor


class MaskedDiffusionDrafter(OnePassPredictor):
    """Predicts `length` masked tokens behind every sequence, each independent of the others of its block (speculative
    diffusion decoding, arXiv 2408.05636).

    With several `steps`, the most confident tokens are revealed before the others are predicted again. Keys and values
    of decided tokens are kept as the pass that read them first left them, without what came later (the prefix cache of
    Fast-dLLM, arXiv 2505.22618).
    """

    label = "masked diffusion model"

    def __init__(self, predictor: MaskPredictor, length: int, steps: int = 1) -> None:
        self._predictor, self.depth, self._steps = predictor, length, steps
        self.max_context = predictor.decoder.config.context - length
        self._stores: dict[int, tuple[SequenceStore, int]] = {}
        """Per row what is kept, and the number of decided tokens that it holds."""

    def _predict(self, context: Context) -> Float[torch.Tensor, "l r v"]:
        """Logits of the masks of all requests that may have drafts."""
        drafting = [i for i, depth in enumerate(context.max_depth) if depth]
        blocks = [self._predict_block(context.rows[i], context.sequences[i].tokens) for i in drafting]
        vocab = self._predictor.decoder.config.vocab
        return torch.stack(blocks, 1) if blocks else torch.zeros(self.depth, 0, vocab)

    def _predict_block(self, row: int, sequence: Int[np.ndarray, " n"]) -> Float[torch.Tensor, "l v"]:
        """Logits of the masks behind a sequence."""
        p, length, count = self._predictor, len(sequence), self.depth
        store, kept = self._stores.get(row, (p.new_store(length + count), 0))
        # The output at the last token may predict the first mask.
        begin = max(min(kept, length - 1), 0)
        store.grow(length + count)
        masks = np.full(count, p.mask, np.int64)
        token = torch.from_numpy(np.concatenate((sequence[begin:], masks))).to(p.decoder.device)
        logits = p.read(store, token, begin, range(length, length + count))
        self._stores[row] = store, length
        for step in range(1, self._steps):
            logits = self._again(store, token[length - 1 - begin :], length, logits, step)
        return logits

    def _again(
        self, store: SequenceStore, token: Int[torch.Tensor, " n"], length: int, logits: torch.Tensor, step: int
    ) -> Float[torch.Tensor, "l v"]:
        """Logits after one more pass in which the most confident predictions stand in place of their masks."""
        confidence, best = logits.softmax(-1).max(-1)
        shown = confidence.topk(self.depth * step // self._steps).indices
        token = token.clone()
        token[1 + shown] = best[shown]
        fresh = self._predictor.read(store, token, length - 1, range(length, length + self.depth))
        fresh[shown] = logits[shown]
        return fresh

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._stores.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Keep the shared tokens."""
        if row in self._stores:
            store, kept = self._stores[row]
            self._stores[row] = store, min(kept, length)
        return length

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy what is kept of the shared tokens."""
        self._stores.pop(target, None)
        if source in self._stores:
            store, kept = self._stores[source]
            self._stores[target] = store.copy(), min(kept, length)
        return length
