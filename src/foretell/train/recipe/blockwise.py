"""Heads of blockwise parallel decoding, on a frozen target or fine-tuned together with it."""

from typing import Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.speculator.network.blockwise import Blockwise, BlockwiseConfig
from foretell.train.recipe.base import MAX_COUNT, MAX_WIDTH, RecipeSetup
from foretell.train.recipe.heads import HeadsRecipe, HeadsTraining


class BlockwiseTraining(HeadsTraining):
    """Options of `--set`."""

    heads: int = Field(4, ge=1, le=MAX_COUNT)
    """Heads beside the target's own: k - 1 in the paper."""
    inner: int | None = Field(None, ge=1, le=MAX_WIDTH)
    """Width of the hidden layer; None: four times that of the target."""
    draw: Literal["one", "all"] = "all"
    """Loss of a batch: that of one random head (as in the paper; unbiased), or the mean of all heads."""


class BlockwiseRecipe(HeadsRecipe):
    """Mean of the heads' cross-entropies, or that of a random head per batch (Stern et al., arXiv 1811.03115)."""

    name = "blockwise"

    def __init__(self, setup: RecipeSetup, network: Blockwise, options: BlockwiseTraining) -> None:
        super().__init__(setup, network, options)
        self._one = options.draw == "one"

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build heads that initially predict what the target's own head predicts."""
        o = setup.parse_options(BlockwiseTraining)
        inner = 4 * setup.card.hidden if o.inner is None else o.inner
        config = setup.configuration(BlockwiseConfig, o, inner=inner)
        return cls(setup, setup.create_network(Blockwise, config), o)

    def combine(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """The mean of the losses, or a random one."""
        if not self._one:
            return losses.mean()
        return losses[int(torch.randint(len(losses), ()))]

    def combine_with_target(
        self, heads: Float[torch.Tensor, ""], target: Float[torch.Tensor, ""]
    ) -> Float[torch.Tensor, ""]:
        """The mean over all heads, the target's own included."""
        k = self.network.heads
        return (k * heads + target) / (k + 1)
