"""Lenience: the rejection test of speculative sampling with a scaled-down draft distribution. Lossy."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor
from foretell.accept.rejection import residual


@dataclass(frozen=True)
class LenientRejection(LossyAcceptor):
    """Accepts with probability min(1, p/(l q)), else samples from the normalised max(0, p - l q), l the `lenience`
    (Leviathan et al., arXiv 2211.17192, A.5).

    No token's probability exceeds p/l; l = 1 is the exact test. At temperature 0, tokens with at least l times the
    probability of the most probable one are accepted.

    Raises:
        ValueError: a lenience outside (0, 1].
    """

    label = "lenient rejection"

    lenience: float = 0.5

    first_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience lies in (0, 1], where 1 is exact; found {self.lenience}")

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """Tokens nearly as probable as the most probable one; with a lenience of 1 this one alone, of equals too."""
        if self.lenience == 1:
            return torch.arange(len(p), device=p.device) == p.argmax()
        return p >= self.lenience * p.max()

    def accepted_mass(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """The part of q below p/l."""
        return torch.minimum(q, p / self.lenience)

    def residual(self, p: Float[torch.Tensor, " v"], q: Float[torch.Tensor, " v"]) -> Float[torch.Tensor, " v"]:
        """Normalised max(0, p - l q); p itself where that is zero everywhere."""
        return residual(p, self.lenience * q)
