"""An adapter with which the target itself drafts over random tokens (UNO, arXiv 2609.04010)."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch
from pydantic import Field
from torch import nn

from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.one_pass import noise_tokens, pard
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.engine.method import AnyMethod
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.low_rank import adapted_shapes
from foretell.speculator.network.uno import UnoAdapters, UnoConfig
from foretell.speculator.peft_writer import write_peft
from foretell.train.data.batch import Batch
from foretell.train.objective.block import sample_blocks
from foretell.train.objective.distillation import Objective
from foretell.train.objective.unrolled import mean_loss, top1_agreement
from foretell.train.recipe.base import MAX_WIDTH, MEASURE_TREE_NODES, LabelledRecipe, LabelOptions, Loss, RecipeSetup


class UnoTraining(LabelOptions):
    """Options of `--set`."""

    rank: int = Field(16, ge=1, le=MAX_WIDTH)
    """Rank of the adapter."""
    depth: int = Field(8, ge=2, le=64)
    """Tokens of a draft (`num_steps`): the target's own, and one for each of `depth - 1` random tokens."""
    anchors: int = Field(32, ge=1)
    """Maximum number of random positions per text of a batch after which the target drafts."""
    objective: Objective = "tvd"
    """How the distribution is learned: the authors' loss is the total variation (times two)."""


class UnoRecipe(LabelledRecipe):
    """The target's distributions, at random tokens behind random positions of the text.

    A random token reads what it reads when the target drafts: the text up to the position, with the target's own
    weights, and the random tokens before it, with the adapter. The authors' trainer cuts the whole text into blocks,
    whose rows take part in one pass with those of the text; its mask is in a file of their model that was not at hand.
    The size of their blocks grows in stages: here `--from` continues a training with a greater `depth`.
    """

    name = "uno"
    network: UnoAdapters
    config: UnoConfig

    def __init__(self, setup: RecipeSetup, network: UnoAdapters, config: UnoConfig, options: UnoTraining) -> None:
        self.network, self.config, self.options, self._setup = network, config, options, setup
        self._embedding_and_head = setup.embedding_and_head
        self._tokens = noise_tokens(setup.codec, setup.card.vocab)

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build the adapter, which changes nothing at first. It drafts every token.

        Raises:
            ValueError: unknown options, or a target that cannot be adapted.
        """
        options = setup.parse_options(UnoTraining)
        config = UnoConfig(target=setup.card, rank=options.rank, shapes=adapted_shapes(setup.decoder))
        network = replace(setup, draft_tokens=None).create_network(UnoAdapters, config)
        return cls(setup, network, config, options)

    @property
    def draft_length(self) -> int:
        """Tokens that it learns to draft in one pass."""
        return self.options.depth

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The mean over all random tokens."""
        o = self.options
        labels = self.target_labels(batch, batch.loss_mask)
        anchor, row = sample_blocks(labels, o.anchors, o.depth - 1)
        labels = labels.with_candidates(o.candidates)
        noise = torch.randint(1, self._tokens, row.shape, device="cpu").to(batch.token.device)
        learned = row >= 0
        states = network(self._setup.decoder, batch.token, (anchor - 1).clamp(min=0), noise)[learned]
        draft, target = self.network.compute_logits(states, labels.candidates), labels.logits[row[learned]]
        place = learned.nonzero()[:, 2]
        parts = [(draft[place == i].detach(), target[place == i]) for i in range(o.depth - 1)]
        metrics = {f"depth {i} top 1": top1_agreement(*part) for i, part in enumerate(parts, 2)}
        return Loss(mean_loss(draft, target, o.hard, o.objective), metrics)

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily. It is drafted with the adapter as it is written."""
        assert isinstance(network, UnoAdapters)
        s, options = self._setup, DFlashOptions(num_draft_tokens=MEASURE_TREE_NODES, num_steps=self.options.depth)
        with TemporaryDirectory() as folder:
            write_peft(Path(folder), network.adapters, s.config, s.card.name)
            context = BuildContext(s.card.vocab, s.network or s.decoder, codec=s.codec, checkpoint=s.checkpoint)
            return pard(replace(context, speculators=(Path(folder),)), options)

    def usage(self, out: str) -> str:
        """The method that drafts with the adapter."""
        return f"--method pard --draft-model {out}"

    def save(self, folder: Path) -> None:
        """Write the adapter for further training, and in PEFT's format into `adapter/`."""
        super().save(folder)
        write_peft(folder / "adapter", self.network.adapters, self._setup.config, self._setup.card.name)
