"""The multi-stage MLP speculator, trained on text and then on what the target writes itself."""

from collections.abc import Sequence
from typing import Self

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from foretell.catalogue.feature_level import mlp_speculator_method
from foretell.catalogue.options import MLPSpeculatorOptions as DraftingOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from foretell.train.data.batch import Batch
from foretell.train.data.features import hidden_layers_of
from foretell.train.objective.stages import StageLosses, Teacher, lesson, stage_losses
from foretell.train.objective.teacher import TargetHead
from foretell.train.recipe.base import MAX_WIDTH, TREE, Loss, Recipe, Setup


class MLPSpeculatorOptions(BaseModel):
    """What `--set` may say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stages: int = Field(default=4, ge=1, le=16)
    inner: int = Field(default=1024, ge=1, le=MAX_WIDTH)
    """Width of the state."""
    tied: bool = False
    """All stages share their weights."""
    scale_input: bool = False
    own_head: bool = False
    """Train an output matrix, from the target's: large, and better on large models."""
    more_hidden_layers: str = ""
    """Further layers of the target to read, with commas between: better drafts, but no published format has a place for
    them.
    """
    decay: float = Field(1.0, gt=0, le=1)
    """Weight of a stage's loss relative to that of the stage before; 1 is the released training."""
    soft: float = Field(0.9, ge=0, le=1)
    """Share of the loss that is learned from the target's distributions; the rest is learned from the tokens that
    came.
    """
    temperature: float = Field(1.0, gt=0)
    """Of the target's distributions."""
    candidates: int = Field(2048, ge=0)
    """Tokens that the loss of a batch looks at: those that come, the target's likeliest, and some drawn at random; 0:
    all that are drafted.
    """


class MLPSpeculatorRecipe(Recipe):
    """Cross-entropy summed over the stages, each given the true tokens before it (Wertheimer et al., arXiv 2404.19124).

    The paper trains in two parts: long sequences of plain text in small batches; then, from 10 % of the learning rate
    on, short texts of the target in large batches; 5 steps to 2. That is two trainings here, the second with `--from`
    the first. Learning from the target's distributions (`soft`) is ours.
    """

    name = "mlp_speculator"
    network: MLPSpeculator
    config: MLPSpeculatorConfig

    def __init__(self, setup: Setup, network: MLPSpeculator, options: MLPSpeculatorOptions) -> None:
        self.network, self.config, self.options = network, network.config, options
        index = setup.draft_index()
        self._place = torch.arange(setup.card.vocab) if index is None else index
        self._said = TargetHead(setup.ends, setup.kept)

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """A network of the sizes in the options."""
        o = setup.parse(MLPSpeculatorOptions)
        config = MLPSpeculatorConfig(
            target=setup.card,
            draft_vocab=setup.draft_vocab,
            own_head=o.own_head,
            stages=o.stages,
            inner=o.inner,
            tied=o.tied,
            scale_input=o.scale_input,
            more_hidden_layers=hidden_layers_of(o.more_hidden_layers, setup.card.layers, "--set more_taps"),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            network = MLPSpeculator(config, setup.ends)
        setup.choose(network)
        return cls(setup, network, o)

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """All stages at all positions of the answers."""
        o, own = self.options, self.network
        learn = lesson(batch.token, batch.answer, self._place.to(batch.token.device), own.stages)
        states = [f.flatten(0, 1) for f in batch.features]
        teacher = Teacher(self._said, states[0], o.soft, o.temperature) if o.soft else None
        frozen = own.head is None and not own.config.own_embedding

        def use(readings: Sequence[Float[torch.Tensor, "k r"]]) -> StageLosses:
            return stage_losses(own.judge, readings, learn, teacher, frozen, count=o.candidates if teacher else 0)

        losses: StageLosses = network([s[learn.at] for s in states], learn.given, use)
        figures = {f"loss {i + 1}": loss.item() for i, loss in enumerate(losses.loss)}
        figures |= {f"top-1 {i + 1}": top for i, top in enumerate(losses.top1)}
        return Loss(losses.total(o.decay), figures)

    def method(self, network: Speculator) -> AnyMethod:
        """A whole tree by confidence, matched."""
        assert isinstance(network, MLPSpeculator)
        return mlp_speculator_method(network, DraftingOptions(num_draft_tokens=TREE))
