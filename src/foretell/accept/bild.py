"""Big Little Decoder's rollback: drafts are accepted unless the target finds them too unlikely. Lossy."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class BiLDRollback(LossyAcceptor):
    """Accepts tokens with -log p(x) <= `distance` nats, and the target's most probable one (BiLD, arXiv 2302.07863).

    The distance is the cross-entropy of the small model's hard prediction under the target. The first token beyond it
    is replaced by the target's own, and the rest is dropped. The most probable token never rolls back, since it would
    be replaced by itself; the released code then also skips the rollback of later tokens, this class does not. Use it
    with a chain that falls back: `Chain(10, draw=False, fallback=0.6)`.

    Raises:
        ValueError: a negative distance.
    """

    label = "rollback (BiLD)"

    distance: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distance >= 0:
            raise ValueError(f"the distance to roll back at is 0 nats or more, found {self.distance}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens within the distance, and the most probable one."""
        near = -p.log() <= self.distance
        near[p.argmax()] = True
        return near
