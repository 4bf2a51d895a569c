"""Synthetic acceptance: drafts are accepted by chance, at given rates, whatever they are. Lossy, for load tests."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float

from foretell.accept.lossy import LossyAcceptor


@dataclass(frozen=True)
class SyntheticAcceptance(LossyAcceptor):
    """Accepts the first i + 1 drafts of a chain with probability `rates[i]`, as vLLM's `synthetic_acceptance_rates` and
    llama.cpp's `--spec-synth-rates` do; the target's own token follows. Drafts beyond the rates are rejected.

    Raises:
        ValueError: rates outside 0..1, or one above that before it.
    """

    label = "synthetic rates"

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 <= after <= before <= 1 for before, after in zip((1.0, *self.rates), self.rates, strict=False)):
            raise ValueError(
                f"synthetic acceptance rates lie in 0..1 and do not rise, since each is the chance of all drafts up to "
                f"its position; found {', '.join(map(str, self.rates))}"
            )

    def fixed_rate(self, depth: int) -> float:
        """The rate of this position by that of the one before it."""
        if depth >= len(self.rates) or not self.rates[depth]:
            return 0.0
        return self.rates[depth] / (self.rates[depth - 1] if depth else 1.0)

    def acceptable(self, p: Float[torch.Tensor, " v"]) -> Bool[torch.Tensor, " v"]:
        """No token by its probability."""
        return torch.zeros_like(p, dtype=torch.bool)
