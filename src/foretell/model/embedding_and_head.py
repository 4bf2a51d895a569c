"""The two ends of a target, which everything that drafts for it shares: its embedding and its head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Weights of a target that its speculators use and never change.

    `head` sees hidden states after the final norm, as tapped at `layers + 1`. Both may be one tensor (tied).
    """

    embedding: Float[torch.Tensor, "v d"]
    head: Float[torch.Tensor, "v d"]
    embedding_scale: float = 1.0
    softcap: float = 0.0
    """Gemma 2's bound on logits; 0: none."""

    @property
    def vocab(self) -> int:
        """Tokens the target knows."""
        return len(self.embedding)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.embedding.shape[1])
