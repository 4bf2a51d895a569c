"""PARD: a draft model cut from the target, trained with mask tokens at random positions."""

from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from foretell.catalogue.one_pass import pard_method
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator, last_undrafted
from foretell.speculator.network.draft_model import draft_config
from foretell.speculator.network.pard import PardConfig, PardNetwork
from foretell.train.data.batch import Batch
from foretell.train.data.features import parse_hidden_layers
from foretell.train.objective.block import sample_blocks
from foretell.train.objective.unrolled import top1_agreement, unrolled_loss
from foretell.train.recipe.base import MEASURE_TREE_NODES, LabelledRecipe, LabelOptions, Loss, RecipeSetup
from foretell.train.recipe.draft_model import init_draft, select_blocks


class PardTraining(LabelOptions):
    """Options of `--set`."""

    layers: int = Field(3, ge=1)
    """Number of the target's blocks that the draft model keeps."""
    blocks: str = "even"
    """Which blocks: `even`, `influence`, or numbers, as for `draft_model`."""
    depth: int = Field(6, ge=2, le=64)
    """Tokens that are drafted in one pass."""
    states: str = ""
    """Hidden layers of the target that are added to the tokens, separated by commas (PARD-2); empty: none (PARD)."""
    state_drop: float = Field(0.5, ge=0, le=1)
    """Share of texts that PARD-2 learns without the hidden states."""
    mask_token: int | None = Field(None, ge=0)
    """Token that stands for later ones; unset: the last one of the vocabulary that is not drafted."""
    anchors: int = Field(64, ge=1)
    """Maximum number of random positions per text of a batch after which masks are learned."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a depth's loss relative to that of the previous depth."""


class PardRecipe(LabelledRecipe):
    """The target's distributions at all depths of a draft in one pass (arXiv 2504.18583).

    The paper drops more positions at every depth; here the masks of all depths are learned at the same random
    positions, and the first depth everywhere. `--from` takes a `draft_model` as well. With `states` it is PARD-2 (arXiv
    2605.08632), whose authors weight a depth by the probability of the tokens before it; here it is the decay.
    """

    name = "pard"
    network: PardNetwork
    config: PardConfig

    def __init__(self, setup: RecipeSetup, network: PardNetwork, options: PardTraining) -> None:
        self.network, self.config, self.options = network, network.config, options
        self._embedding_and_head = setup.embedding_and_head

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Copy the draft model from the target.

        Raises:
            ValueError: unknown options, or values that do not fit the target.
        """
        o = setup.parse_options(PardTraining)
        blocks = select_blocks(o, setup)
        rare = last_undrafted(setup.draft_tokens, setup.card.vocab)
        config = setup.configuration(
            PardConfig,
            o,
            model=draft_config(setup.config, blocks),
            blocks=() if setup.checkpoint is None else blocks,
            state_layers=parse_hidden_layers(o.states, setup.card.layers + 1, "--set states"),
            mask_token=rare if o.mask_token is None else o.mask_token,
        )
        network = PardNetwork(config, setup.embedding_and_head)
        init_draft(network, setup, blocks)
        return cls(setup, network, o)

    @property
    def draft_length(self) -> int:
        """Tokens that it learns to draft in one pass."""
        return self.network.depth

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The weighted sum over the depths."""
        o, depth = self.options, self.network.depth
        labels = self.target_labels(batch, batch.loss_mask)
        anchor, row = sample_blocks(labels, o.anchors, depth)
        labels = labels.with_candidates(o.candidates)
        first = F.pad(labels.row >= 0, (0, 1))
        wanted = [first, *(row[..., i] >= 0 for i in range(1, depth))]
        targets = [labels.logits, *(labels.logits[row[..., i][mask]] for i, mask in enumerate(wanted[1:], 1))]
        read = [batch.features[self.hidden_layers.index(layer)] for layer in self.config.state_layers]
        kept = torch.rand(len(batch.token), device="cpu") >= o.state_drop if read else None
        given = None if kept is None else torch.cat(read, -1) * kept.to(batch.token.device)[:, None, None]
        states = network(batch.token, anchor, wanted, given)
        pairs = [(self.network.compute_logits(s, labels.candidates), t) for s, t in zip(states, targets, strict=True)]
        metrics = {f"depth {i + 1} top 1": top1_agreement(q.detach(), p) for i, (q, p) in enumerate(pairs)}
        return Loss(unrolled_loss(pairs, o.decay, o.hard, o.objective), metrics | {"covered": labels.covered})

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily."""
        assert isinstance(network, PardNetwork)
        return pard_method(network, DFlashOptions(num_draft_tokens=MEASURE_TREE_NODES))
