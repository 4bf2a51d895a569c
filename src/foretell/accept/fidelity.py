"""What a lossy method costs in fidelity: how far the law of each decided token is from the target's."""

from dataclasses import dataclass

import torch
from jaxtyping import Float


@dataclass(frozen=True)
class TokenFidelity:
    """The price of one decided token.

    `variation`: total variation between the law that decided it (over the drafter's and the acceptor's randomness) and
    the target's, 0..1. `divergence`: Kullback-Leibler divergence of the first from the second in nats. `changed`: the
    target's own draw with this seed is another token.
    """

    variation: float
    divergence: float
    changed: bool


@dataclass
class FidelityLoss:
    """Sums of tolls over the decided tokens of a request; a lossless method pays nothing and counts nothing."""

    tokens: int = 0
    variation: float = 0.0
    divergence: float = 0.0
    changed: int = 0

    def add(self, token: TokenFidelity) -> None:
        """Count one token."""
        self.tokens += 1
        self.variation += token.variation
        self.divergence += token.divergence
        self.changed += token.changed

    @property
    def mean_variation(self) -> float:
        """Total variation per token."""
        return self.variation / self.tokens if self.tokens else 0.0

    @property
    def mean_divergence(self) -> float:
        """Kullback-Leibler divergence per token, in nats."""
        return self.divergence / self.tokens if self.tokens else 0.0

    @property
    def changed_share(self) -> float:
        """Share of tokens that differ from the target's own draw."""
        return self.changed / self.tokens if self.tokens else 0.0


def total_variation(distribution: Float[torch.Tensor, " v"], target: Float[torch.Tensor, " v"]) -> float:
    """Half the summed difference of two distributions."""
    return float((distribution - target).abs().sum()) / 2


def kl_divergence(distribution: Float[torch.Tensor, " v"], target: Float[torch.Tensor, " v"]) -> float:
    """KL(law || target) in nats; what the target forbids counts as having a probability of 1e-10, so that sums stay
    finite.
    """
    some = distribution > 0
    return max(0.0, float((distribution[some] * (distribution[some] / target[some].clamp_min(1e-10)).log()).sum()))
