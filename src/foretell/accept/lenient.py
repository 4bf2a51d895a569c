"""Lenience: the rejection test of speculative sampling with the draft's law scaled down. Changes the law."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class LenientRejection(LossyAcceptor):
    """Accepts with probability min(1, p/(l q)), else draws from the normalised max(0, p - l q) (Leviathan et al., arXiv
    2211.17192, A.5). Lossy.

    No token's probability exceeds p/l; l = 1 is the exact test. At temperature 0 a draft stands that has at least l
    times the probability of the target's best token.
    """

    label = "lenient rejection"

    lenience: float = 0.5

    first_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience lies in (0, 1], where 1 is exact; found {self.lenience}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens nearly as probable as the best."""
        return p >= self.lenience * p.max()

    def accepted_mass(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The part of q below p/l."""
        return torch.minimum(q, p / self.lenience)

    def residual(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """What l q leaves of p; p itself where that is nothing."""
        left = (p - self.lenience * q).clamp_min(0)
        total = left.sum()
        return left / total if total > 0 else p
