"""Heads of blockwise parallel decoding, on a frozen target or fine-tuned together with it."""

from typing import Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.speculator.network.blockwise import Blockwise, BlockwiseConfig
from foretell.train.recipe.base import MAX_COUNT, MAX_WIDTH, RecipeSetup
from foretell.train.recipe.heads import HeadsOptions, HeadsRecipe


class BlockwiseOptions(HeadsOptions):
    """What `--set` may say."""

    heads: int = Field(4, ge=1, le=MAX_COUNT)
    """Heads beside the target's own, which scores: k - 1 of the paper."""
    inner: int | None = Field(None, ge=1, le=MAX_WIDTH)
    """Hidden units of the layer; four times the target's width if unsaid."""
    draw: Literal["one", "all"] = "all"
    """Per batch the loss of one head, drawn at random (the paper's, unbiased), or the mean of all."""


class BlockwiseRecipe(HeadsRecipe):
    """The mean of the heads' cross-entropies, or that of a head drawn per batch (Stern et al., arXiv 1811.03115, 6)."""

    name = "blockwise"

    def __init__(self, setup: RecipeSetup, network: Blockwise, options: BlockwiseOptions) -> None:
        super().__init__(setup, network, options)
        self._one = options.draw == "one"

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Heads that say what the target's own head says."""
        o = setup.parse_options(BlockwiseOptions)
        config = BlockwiseConfig(
            target=setup.card,
            draft_vocab=setup.draft_vocab,
            heads=o.heads,
            inner=4 * setup.card.hidden if o.inner is None else o.inner,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            network = Blockwise(config, setup.embedding_and_head)
        setup.set_draft_tokens(network)
        return cls(setup, network, o)

    def combine(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """The mean, or one of them."""
        if not self._one:
            return losses.mean()
        return losses[int(torch.randint(len(losses), ()))]

    def combine_with_target(self, heads: Float[torch.Tensor, ""], language: Float[torch.Tensor, ""]) -> Float[torch.Tensor, ""]:
        """The mean over all heads of the paper, the target's own being the first."""
        k = self.network.heads
        return (k * heads + language) / (k + 1)
