"""The target as teacher: its logits over the drafted tokens."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int

from foretell.model.embedding_and_head import EmbeddingAndHead


class TargetHead:
    """The target's output matrix, of which `drafted` rows count (None: all), with its bound on logits."""

    def __init__(self, ends: EmbeddingAndHead, drafted: Int[torch.Tensor, " w"] | None = None) -> None:
        self._rows = ends.head if drafted is None else ends.head[drafted.to(ends.head.device)]
        self._softcap = ends.softcap

    def __call__(self, state: Float[torch.Tensor, "*k d"]) -> Float[torch.Tensor, "*k w"]:
        """Logits, float32, from the states that the head sees."""
        out = F.linear(state.to(self._rows.dtype), self._rows.to(state.device)).float()
        return torch.tanh(out / self._softcap) * self._softcap if self._softcap else out
