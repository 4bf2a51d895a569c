"""Medusa's typical acceptance: every token that is probable enough is accepted. Lossy."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class TypicalAcceptance(LossyAcceptor):
    """Accepts x where p(x) > min(epsilon, delta * exp(-H(p))), H the entropy in nats (Medusa, arXiv 2401.10774).

    At temperature 0 that is the target's most probable token only. `delta` None: sqrt(epsilon).

    Raises:
        ValueError: an epsilon outside (0, 1].
    """

    label = "typical acceptance"

    epsilon: float = 0.09
    delta: float | None = None

    softmax_at_zero = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"typical acceptance: epsilon lies in (0, 1], found {self.epsilon}")

    def threshold(self, entropy: float) -> float:
        """The probability that a token must exceed where the target's entropy is `entropy` nats."""
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        return min(self.epsilon, delta * math.exp(-entropy))

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens above the threshold of p's entropy."""
        return p > self.threshold(float(-torch.special.xlogy(p, p).sum()))
