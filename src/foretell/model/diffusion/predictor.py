"""Predicts masked tokens of one sequence, reading all of it or a window."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int

from foretell.model.block.decoder import Decoder
from foretell.model.diffusion.attention import SequenceStore, WindowAttention
from foretell.model.training.full_forward import forward_blocks


class MaskPredictor:
    """A decoder that predicts masked tokens.

    `shifted`, `block`: see `DiffusionConfig`. The mask token itself is never predicted.
    """

    def __init__(self, decoder: Decoder, mask: int, shifted: bool = False, block: int = 0) -> None:
        self.decoder, self.mask, self.shifted, self.block = decoder, mask, shifted, block

    def new_store(self, length: int) -> SequenceStore:
        """An empty store for a sequence of this length."""
        d = self.decoder
        return SequenceStore(d.config, length, d.embedding.dtype, d.device)

    @torch.inference_mode()
    def read(
        self,
        store: SequenceStore,
        token: Int[torch.Tensor, " n"],
        begin: int,
        positions: Sequence[int],
        end: int | None = None,
    ) -> Float[torch.Tensor, "k v"]:
        """Read a window of tokens that starts at position `begin`; logits of the tokens at `positions`.

        The window attends to all positions before `end` (None: its own end), the store having the others; with blocks,
        only to those of its own and earlier blocks. The output that predicts a position must lie in the window.
        """
        d, shift = self.decoder, int(self.shifted)
        stop = begin + len(token)
        end = stop if end is None else end
        attention = WindowAttention(d.config, store, begin, end, self._block_mask(begin, stop, end))
        x, position = d.embed(token)[None], torch.arange(begin, stop, device=d.device)
        x = forward_blocks(d.blocks, d.config, (d.rope_tables, d.local_rope_tables), x, 0, attention, position)
        rows = torch.tensor(positions, dtype=torch.long, device=d.device) - shift - begin
        logits = d.logits(d.final_norm(x[0, rows]))
        logits[:, self.mask] = float("-inf")
        return logits

    def _block_mask(self, begin: int, stop: int, end: int) -> Bool[torch.Tensor, "1 1 n s"] | None:
        """Which positions before `end` the positions of a window attend to; None: all."""
        if not self.block or (stop - 1) // self.block == begin // self.block:
            return None
        query, key = torch.arange(begin, stop) // self.block, torch.arange(end) // self.block
        return (key <= query[:, None])[None, None].to(self.decoder.device)
