"""Recurrent speculators: the MLP speculator of IBM, trained on plain text and then on the target's own answers, and
ReDrafter.
"""

from collections.abc import Sequence
from typing import Self

import torch
from jaxtyping import Float
from pydantic import Field
from torch import nn

from foretell.catalogue.feature_level import mlp_speculator_method, redrafter_method
from foretell.catalogue.options.feature_level import BeamSearchOptions, MLPSpeculatorOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from foretell.speculator.network.recurrent import RecurrentNetwork
from foretell.speculator.network.redrafter import ReDrafter, ReDrafterConfig
from foretell.train.data.batch import Batch
from foretell.train.data.features import parse_hidden_layers
from foretell.train.objective.distillation import Objective
from foretell.train.objective.stages import SoftLabels, StageLosses, stage_labels, stage_losses
from foretell.train.objective.target_head import TargetHead
from foretell.train.recipe.base import (
    MAX_COUNT,
    MAX_WIDTH,
    MEASURE_TREE_NODES,
    CandidateOptions,
    Loss,
    Recipe,
    RecipeSetup,
)


class RecurrentTraining(CandidateOptions):
    """Options of `--set` for recurrent speculators."""

    own_head: bool = False
    """Train its own output matrix, initialised with the target's: large, and better on large models."""
    decay: float = Field(1.0, gt=0, le=1)
    """Weight of a stage's loss relative to that of the previous stage; 1 in the released training code."""
    soft: float = Field(0.9, ge=0, le=1)
    """Weight of the loss against the target's distributions; the rest is against the tokens of the data."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the target's distributions."""
    objective: Objective = "cross_entropy"
    """How the distributions are learned; for decoding at temperature 1 `nla`, `lk_hybrid` or `tvd`, with `soft=1`."""


class MLPSpeculatorTraining(RecurrentTraining):
    """Options of the MLP speculator."""

    inner: int = Field(default=1024, ge=1, le=MAX_WIDTH)
    """Width of the state."""
    stages: int = Field(default=4, ge=1, le=16)
    tied: bool = False
    """All stages share their weights."""
    scale_input: bool = False
    more_hidden_layers: str = ""
    """Further hidden layers of the target to read, separated by commas: better drafts, but no published format supports
    them.
    """


class ReDrafterTraining(RecurrentTraining):
    """Options of ReDrafter."""

    inner: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Width of the state; unset: that of the target's, 1024 at most. The published format has no wider one."""
    stages: int = Field(default=5, ge=1, le=64)
    """Tokens to draft."""
    layers: int = Field(default=2, ge=0, le=MAX_COUNT)
    """Residual layers before the target's head."""


class RecurrentRecipe(Recipe):
    """The loss summed over the stages, with teacher forcing."""

    network: RecurrentNetwork

    def __init__(
        self, setup: RecipeSetup, network: RecurrentNetwork, options: RecurrentTraining, frozen_head: bool
    ) -> None:
        self.network, self.config, self.options, self._frozen = network, network.config, options, frozen_head
        index = setup.draft_index()
        self._draft_index = torch.arange(setup.card.vocab) if index is None else index
        self._target_head = TargetHead(setup.embedding_and_head, setup.draft_tokens)

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of all stages at all positions of the answers."""
        o, own = self.options, self.network
        labels = stage_labels(batch.token, batch.loss_mask, self._draft_index.to(batch.token.device), own.stages)
        states = [f.flatten(0, 1) for f in batch.features]
        soft_labels = SoftLabels(self._target_head, states[0], o.soft, o.temperature, o.objective) if o.soft else None

        def losses_of(head_inputs: Sequence[Float[torch.Tensor, "k r"]]) -> StageLosses:
            num_candidates = o.candidates if soft_labels else 0
            return stage_losses(
                own.head_logits, head_inputs, labels, soft_labels, self._frozen, num_candidates=num_candidates
            )

        losses: StageLosses = network([s[labels.cell] for s in states], labels.input_token, losses_of)
        metrics = {f"loss {i + 1}": loss.item() for i, loss in enumerate(losses.loss)}
        metrics |= {f"top-1 {i + 1}": top for i, top in enumerate(losses.top1)}
        return Loss(losses.total(o.decay), metrics)


class MLPSpeculatorRecipe(RecurrentRecipe):
    """Cross-entropy summed over the stages with teacher forcing (Wertheimer et al., arXiv 2404.19124).

    The paper trains in two phases with 5 : 2 steps: long sequences of plain text in small batches; then short answers
    of the target in large batches, from 10 % of the learning rate. Here these are two trainings, the second with
    `--from`. The loss against the target's distributions (`soft`) is not in the paper.
    """

    name = "mlp_speculator"
    network: MLPSpeculator

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build a network of the given sizes."""
        o = setup.parse_options(MLPSpeculatorTraining)
        more = parse_hidden_layers(o.more_hidden_layers, setup.card.layers, "--set more_hidden_layers")
        config = setup.configuration(MLPSpeculatorConfig, o, more_hidden_layers=more)
        network = setup.create_network(MLPSpeculator, config)
        return cls(setup, network, o, network.head is None and not config.own_embedding)

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, MLPSpeculator)
        return mlp_speculator_method(network, MLPSpeculatorOptions(num_draft_tokens=MEASURE_TREE_NODES))


class ReDrafterRecipe(RecurrentRecipe):
    """The same for a recurrent network whose steps share their weights (arXiv 2403.09919)."""

    name = "redrafter"
    network: ReDrafter

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build a network of the given sizes."""
        o = setup.parse_options(ReDrafterTraining)
        config = setup.configuration(ReDrafterConfig, o, inner=o.inner or min(1024, setup.card.hidden))
        network = setup.create_network(ReDrafter, config)
        return cls(setup, network, o, network.head is None)

    def method(self, network: Speculator) -> AnyMethod:
        """Beam search, verified greedily."""
        assert isinstance(network, ReDrafter)
        return redrafter_method(network, BeamSearchOptions())
