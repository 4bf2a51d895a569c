"""How far the tokens of a lossy method deviate from the target's distribution."""

from dataclasses import dataclass

import torch
from jaxtyping import Float

MIN_PROBABILITY = 1e-10
"""Lower bound of the target's probabilities in divergences, which keeps sums finite."""


@dataclass(frozen=True)
class TokenFidelity:
    """Deviation of one new token.

    `variation`: total variation distance, 0..1, between the distribution that the token was sampled from (over the
    randomness of drafter and acceptor) and the target's. `divergence`: Kullback-Leibler divergence of the first from
    the second, in nats. `changed`: plain decoding with this seed samples another token.
    """

    variation: float
    divergence: float
    changed: bool


@dataclass
class FidelityLoss:
    """Sums over the new tokens of a request; a lossless method counts nothing."""

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
        """Mean total variation distance per token."""
        return self.variation / self.tokens if self.tokens else 0.0

    @property
    def mean_divergence(self) -> float:
        """Mean Kullback-Leibler divergence per token, in nats."""
        return self.divergence / self.tokens if self.tokens else 0.0

    @property
    def changed_share(self) -> float:
        """Share of tokens that differ from those of plain decoding at the same position."""
        return self.changed / self.tokens if self.tokens else 0.0


def total_variation(distribution: Float[torch.Tensor, " v"], target: Float[torch.Tensor, " v"]) -> float:
    """Half the sum of the absolute differences of two distributions."""
    return float((distribution - target).abs().sum()) / 2


def kl_divergence(distribution: Float[torch.Tensor, " v"], target: Float[torch.Tensor, " v"]) -> float:
    """KL(distribution || target) in nats, with the target's probabilities clamped to `MIN_PROBABILITY`."""
    some = distribution > 0
    return max(
        0.0, float((distribution[some] * (distribution[some] / target[some].clamp_min(MIN_PROBABILITY)).log()).sum())
    )
