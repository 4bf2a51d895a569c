"""Blockwise parallel decoding's heads: one feed-forward layer for all of them, with a residual from the state to
each.
"""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import nn

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.heads import HeadsConfig, HeadsNetwork


class BlockwiseConfig(HeadsConfig):
    """Sizes of blockwise heads."""

    kind: Literal["blockwise"] = "blockwise"
    inner: int = Field(2304, ge=1)
    """Hidden units of the layer, for all heads together."""


class Blockwise(HeadsNetwork):
    """One feed-forward layer from the state to `heads` versions of it, each added to the state itself (Stern et al.,
    arXiv 1811.03115).

    The paper's first head, which scores, passes the layer by (its footnote finds no difference), so that the target
    stays as it is; `heads` counts the others. The layer's last matrix starts at zero: an untrained head says what the
    target's own head says.
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
        """Through the layer, and the state added to each of its parts."""
        return h[..., None, :] + self.out(torch.relu(self.into(h))).unflatten(-1, (self.heads, -1))
