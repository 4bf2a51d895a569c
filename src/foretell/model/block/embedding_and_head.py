"""Embedding and output head of a target, which its speculators share."""

from dataclasses import dataclass

import torch
from jaxtyping import Float


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embedding and head of a target; speculators use them and do not change them.

    The input of `head` is the hidden state after the final norm (hidden layer `layers + 1`). Both may be one tensor
    (tied).
    """

    embedding: Float[torch.Tensor, "v d"]
    head: Float[torch.Tensor, "v d"]
    embedding_scale: float = 1.0
    softcap: float = 0.0
    """Soft cap on logits (Gemma 2); 0: none."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return len(self.embedding)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.embedding.shape[1])
