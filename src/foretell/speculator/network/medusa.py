"""Medusa's heads: residual blocks on the target's last hidden state, then an output matrix."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.heads import HeadsConfig, HeadsNetwork


class MedusaConfig(HeadsConfig):
    """Configuration of Medusa heads. `own_head`: every head has its own output matrix, as in published checkpoints."""

    kind: Literal["medusa"] = "medusa"
    blocks: int = Field(1, ge=0)
    """Residual blocks per head."""


class Medusa(HeadsNetwork):
    """Per head `blocks` times `h + SiLU(W h + b)`, then the output matrix (Cai et al., arXiv 2401.10774).

    Weights and biases are initialised to zero, so untrained heads give the target's own logits.
    """

    kind = "medusa"

    def __init__(self, config: MedusaConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config.model_copy(update={"own_head": False}), embedding_and_head)
        self.config: MedusaConfig = config
        width = config.target.hidden
        self.residual = nn.ModuleList(
            nn.ModuleList(_zero_init(nn.Linear(width, width)) for _ in range(config.blocks))
            for _ in range(config.heads)
        )
        shared = self.get_buffer("_shared_head").detach().float()
        self.own_heads = nn.ParameterList(shared.clone() for _ in range(config.heads if config.own_head else 0))
        """Output matrix per head, `[w, d]` each; empty: all use the target's."""

    def set_draft_vocab(self, tokens: Int[torch.Tensor, " n"]) -> None:
        """Set the draft vocabulary, and initialise own matrices to its rows of the target's head."""
        super().set_draft_vocab(tokens)
        for own in self.own_heads:
            own.data.copy_(self.get_buffer("_shared_head"))

    def head_states(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k d"]:
        """Output of every head's residual blocks."""
        return torch.stack([_apply_residual(blocks, h) for blocks in self.residual], -2)

    def compute_logits(
        self, x: Float[torch.Tensor, "*t k d"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t k w"]:
        """Logits of head `i` from `x[..., i, :]`."""
        if not len(self.own_heads):
            return super().compute_logits(x, subset)
        own = [w if subset is None else w[subset.columns] for w in self.own_heads]
        logits = self._apply_softcap(torch.stack([F.linear(x[..., i, :], w) for i, w in enumerate(own)], -2))
        return logits if subset is None else logits + subset.logit_offset


def _zero_init(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _apply_residual(blocks: nn.Module, h: torch.Tensor) -> torch.Tensor:
    for block in blocks.children():
        h = h + F.silu(block(h))
    return h
