"""Heads of blockwise parallel decoding: one feed-forward layer for all heads, with a residual connection to each."""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.heads import HeadsConfig, HeadsNetwork


class BlockwiseConfig(HeadsConfig):
    """Configuration of blockwise heads."""

    kind: Literal["blockwise"] = "blockwise"
    inner: int = Field(2304, ge=1)
    """Hidden units of the layer, for all heads together."""


class Blockwise(HeadsNetwork):
    """One feed-forward layer from the hidden state to `heads` states, each added to the hidden state (Stern et al.,
    arXiv 1811.03115).

    The paper's first head, which predicts the next token, skips the layer (its footnote finds no difference), so that
    the target is unchanged; `heads` counts the others. The last matrix is initialised to zero: untrained heads give the
    target's own logits.
    """

    kind = "blockwise"

    def __init__(self, config: BlockwiseConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config: BlockwiseConfig = config
        width = config.target.hidden
        self.into = nn.Linear(width, config.inner)
        self.out = nn.Linear(config.inner, config.heads * width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def head_states(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k d"]:
        """Input of the output head for every head."""
        return h[..., None, :] + self.out(torch.relu(self.into(h))).unflatten(-1, (self.heads, -1))
