"""P-EAGLE: EAGLE-3's first step at all positions, and masks at random ones, in one pass without unrolling."""

from typing import Self

import torch
from jaxtyping import Bool
from pydantic import Field
from torch import nn

from foretell.catalogue.one_pass import p_eagle_method
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.cached_layers import EXTRA_POSITIONS
from foretell.speculator.network.p_eagle import PEagle, PEagleConfig
from foretell.train.data.batch import Batch
from foretell.train.objective.block import sample_blocks
from foretell.train.objective.unrolled import TargetLabels, top1_agreement, unrolled_loss
from foretell.train.recipe.base import MAX_COUNT, MEASURE_TREE_NODES, Loss, RecipeSetup
from foretell.train.recipe.eagle import Eagle3LayerTraining, EagleRecipe, eagle3_values
from foretell.train.recipe.init_from_target import init_masks


class PEagleTraining(Eagle3LayerTraining):
    """Options of `--set`."""

    layers: int = Field(2, ge=1, le=MAX_COUNT)
    depth: int = Field(7, ge=2, le=EXTRA_POSITIONS)
    """Tokens that are drafted in one pass."""
    anchors: int = Field(64, ge=1)
    """Maximum number of random positions per text of a batch after which masks are learned."""


class PEagleRecipe(EagleRecipe):
    """The target's distributions at all depths of a draft in one pass (arXiv 2602.01469).

    The paper keeps fewer positions at every depth; here the masks of all depths are learned at the same random
    positions, and the first depth everywhere.
    """

    name = "p_eagle"
    network: PEagle
    config: PEagleConfig

    def __init__(self, setup: RecipeSetup, network: PEagle, options: PEagleTraining) -> None:
        super().__init__(setup, network, options)
        init_masks(network, setup.seed)
        self._anchors = options.anchors

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build layers of the size of the target's blocks, on four hidden states."""
        o = setup.parse_options(PEagleTraining)
        config = setup.configuration(PEagleConfig, o, **eagle3_values(setup, "p_eagle", o))
        return cls(setup, PEagle(config, setup.embedding_and_head), o)

    @property
    def draft_length(self) -> int:
        """Tokens that it learns to draft in one pass."""
        return self.network.depth

    def prediction_loss(
        self, network: nn.Module, batch: Batch, loss_mask: Bool[torch.Tensor, "b s"], labels: TargetLabels
    ) -> Loss:
        """The weighted sum over the depths."""
        last, row = sample_blocks(labels, self._anchors, self.network.depth)
        first, target = labels.shifted(1)
        wanted = [first, *(row[..., i] >= 0 for i in range(1, self.network.depth))]
        targets = [target, *(labels.logits[row[..., i][mask]] for i, mask in enumerate(wanted[1:], 1))]
        features = batch.features[: len(self.network.hidden_layers)]
        # A rollout follows the position whose token is the last decided one.
        logits = network(batch.token, features, (last - 1).clamp_min(0), wanted, labels.candidates)
        pairs = list(zip(logits, targets, strict=True))
        metrics = {f"depth {i + 1} top 1": top1_agreement(q.detach(), p) for i, (q, p) in enumerate(pairs)}
        total = unrolled_loss(pairs, self._decay, self._hard, self._objective)
        return Loss(total, metrics | {"covered": labels.covered})

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, PEagle)
        return p_eagle_method(network, DFlashOptions(num_draft_tokens=MEASURE_TREE_NODES))
