"""Big Little Decoder's rollback: a small model's token stands unless the target finds it too unlikely.

Changes the text.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class BiLDRollback(LossyAcceptor):
    """Tolerates tokens at most `distance` nats from a certain one, -log p(x) <= distance, and the target's best (BiLD,
    arXiv 2302.07863). Lossy.

    The distance is the cross-entropy of the small model's hard prediction under the target. At the first token beyond
    it the target's own is written and the rest dropped. The best token never rolls back, since it would be replaced by
    itself; the released code then skips the rollback of later tokens too, this does not. Pair it with a chain that
    falls back: `Chain(10, draw=False, fallback=0.6)`.
    """

    label = "rollback (BiLD)"

    distance: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distance >= 0:
            raise ValueError(f"the distance to roll back at is 0 nats or more, found {self.distance}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens likely enough, and the best."""
        near = -p.log() <= self.distance
        near[p.argmax()] = True
        return near
