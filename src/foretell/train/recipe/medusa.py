"""Medusa's heads, on a frozen target (Medusa-1) or trained together with it (Medusa-2)."""

from typing import Self

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.speculator.network.medusa import Medusa, MedusaConfig
from foretell.train.objective.heads import loss_weights
from foretell.train.recipe.base import MAX_COUNT, RecipeSetup
from foretell.train.recipe.heads import HeadsRecipe, HeadsTraining


class MedusaTraining(HeadsTraining):
    """Options of `--set`."""

    blocks: int = Field(1, ge=1, le=MAX_COUNT)
    """Residual blocks per head."""
    own_head: bool = False
    """Every head trains its own output matrix: large, and better on large models."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a head's loss relative to that of the previous head."""
    heads_weight: float = Field(0.2, gt=0)
    """Weight of the heads' loss relative to the target's own, where the target is tuned."""


class MedusaRecipe(HeadsRecipe):
    """Sum of the heads' cross-entropies, head `i` weighted by `decay ** i` (Cai et al., arXiv 2401.10774, 2.2.1)."""

    name = "medusa"

    def __init__(self, setup: RecipeSetup, network: Medusa, options: MedusaTraining) -> None:
        super().__init__(setup, network, options)
        self._heads_weight = options.heads_weight
        self._weights = torch.tensor(loss_weights(options.heads, options.decay))

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build heads that initially predict what the target's own head predicts."""
        o = setup.parse_options(MedusaTraining)
        return cls(setup, setup.create_network(Medusa, setup.configuration(MedusaConfig, o)), o)

    def combine(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """The weighted sum."""
        return (losses * self._weights.to(losses)).sum()

    def combine_with_target(
        self, heads: Float[torch.Tensor, ""], target: Float[torch.Tensor, ""]
    ) -> Float[torch.Tensor, ""]:
        """The target's loss plus the weighted heads' loss (section 2.2.2)."""
        return target + self._heads_weight * heads
