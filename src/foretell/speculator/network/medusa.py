"""Medusa's heads: residual blocks on the target's last state, then an output matrix."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import nn

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import TokenSubset
from foretell.speculator.network.heads import HeadsConfig, HeadsNetwork


class MedusaConfig(HeadsConfig):
    """Sizes of Medusa heads. `own_head`: every head has an output matrix of its own, as in published checkpoints."""

    kind: Literal["medusa"] = "medusa"
    blocks: int = Field(1, ge=0)
    """Residual blocks per head."""


class Medusa(HeadsNetwork):
    """Per head `blocks` times `h + SiLU(W h + b)`, then the output matrix (Cai et al., arXiv 2401.10774).

    Weights and biases start at zero, so an untrained head says what the target's own head says.
    """

    kind = "medusa"

    def __init__(self, config: MedusaConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config.model_copy(update={"own_head": False}), embedding_and_head)
        self.config: MedusaConfig = config
        width = config.target.hidden
        self.residual = nn.ModuleList(
            nn.ModuleList(_zero(nn.Linear(width, width)) for _ in range(config.blocks)) for _ in range(config.heads)
        )
        borrowed = self.get_buffer("_shared_head").detach().float()
        own = [borrowed.clone() for _ in range(config.heads if config.own_head else 0)]
        self.own_heads = nn.ParameterList(own)
        """Output matrix per head, `[w, d]` each; empty where all use the target's."""

    def set_draft_vocab(self, tokens: Int[torch.Tensor, " n"]) -> None:
        """Fix the tokens it drafts; own matrices start from their rows of the target's."""
        super().set_draft_vocab(tokens)
        for own in self.own_heads:
            own.data.copy_(self.get_buffer("_shared_head"))

    def head_states(self, h: Float[torch.Tensor, "*t d"]) -> Float[torch.Tensor, "*t k d"]:
        """Through every head's residual blocks."""
        return torch.stack([_through(blocks, h) for blocks in self.residual], -2)

    def compute_logits(
        self, x: Float[torch.Tensor, "*t k d"], subset: TokenSubset | None = None
    ) -> Float[torch.Tensor, "*t k w"]:
        """Logits of head `i` from `x[..., i, :]`."""
        if not len(self.own_heads):
            return super().compute_logits(x, subset)
        own = [w if subset is None else w[subset.columns] for w in self.own_heads]
        logits = self._apply_softcap(torch.stack([F.linear(x[..., i, :], w) for i, w in enumerate(own)], -2))
        return logits if subset is None else logits + subset.logit_offset


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _through(blocks: nn.Module, h: torch.Tensor) -> torch.Tensor:
    for block in blocks.children():
        h = h + F.silu(block(h))
    return h
