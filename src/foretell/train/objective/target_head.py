"""The target's output head, over the draft vocabulary."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.model.block.embedding_and_head import EmbeddingAndHead


class TargetHead:
    """The target's logits over the draft vocabulary, softcap included.

    `draft_tokens`: rows of the output matrix to use; None: all.
    """

    def __init__(
        self, embedding_and_head: EmbeddingAndHead, draft_tokens: Int[torch.Tensor, " w"] | None = None
    ) -> None:
        head = embedding_and_head.head
        self._weight = head if draft_tokens is None else head[draft_tokens.to(head.device)]
        self._softcap = embedding_and_head.softcap

    def __call__(self, state: Float[torch.Tensor, "*k d"]) -> Float[torch.Tensor, "*k w"]:
        """Logits in float32, from hidden states after the final norm."""
        out = F.linear(state.to(self._weight.dtype), self._weight.to(state.device)).float()
        return torch.tanh(out / self._softcap) * self._softcap if self._softcap else out
