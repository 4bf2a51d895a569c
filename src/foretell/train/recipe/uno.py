"""An adapter with which the target itself drafts over random tokens (UNO, arXiv 2609.04010)."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import nn

from foretell.catalogue.one_pass import UNO_DEPTH, noise_tokens, uno_method
from foretell.catalogue.options.feature_level import DFlashOptions
from foretell.engine.method import AnyMethod
from foretell.model.block.decoder import Decoder
from foretell.model.training.probe_forward import probe_forward
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.low_rank import adapted_shapes
from foretell.speculator.network.uno import UnoAdapters, UnoConfig
from foretell.speculator.peft_writer import write_peft
from foretell.train.data.batch import Batch
from foretell.train.objective.block import sample_blocks
from foretell.train.objective.distillation import Objective
from foretell.train.objective.unrolled import mean_loss, top1_agreement
from foretell.train.recipe.base import (
    MAX_WIDTH,
    MEASURE_TREE_NODES,
    LabelledRecipe,
    LabelOptions,
    Loss,
    RecipeSetup,
)


class UnoTraining(LabelOptions):
    """Options of `--set`."""

    rank: int = Field(16, ge=1, le=MAX_WIDTH)
    """Rank of the adapter."""
    depth: int = Field(UNO_DEPTH, ge=2, le=64)
    """Tokens of a draft (`num_steps`): the target's own, and one for each of `depth - 1` random tokens."""
    anchors: int = Field(32, ge=1)
    """Maximum number of random positions per text of a batch after which the target drafts."""
    objective: Objective = "tvd"
    """How the distribution is learned: the authors' loss is the total variation (times two)."""


class _AdaptedTarget(nn.Module):
    """The target, whose random tokens alone are read with the adapter. The target is no submodule, so that it is
    neither optimised nor checkpointed.
    """

    def __init__(self, network: UnoAdapters, decoder: Decoder) -> None:
        super().__init__()
        self.network, self._decoder = network, [decoder]

    def forward(
        self, token: Int[torch.Tensor, "b s"], cut: Int[torch.Tensor, "b g"], noise: Int[torch.Tensor, "b g l"]
    ) -> Float[torch.Tensor, "b g l d"]:
        """Inputs of the head at the random tokens behind every cut; see `probe_forward`."""
        decoder = self._decoder[0]
        inputs = decoder.embed(noise.flatten()).view(*noise.shape, -1)
        return probe_forward(decoder, token, cut, inputs, partial(self.network.adapters.applied_to, decoder))


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
        if setup.checkpoint is None:
            raise ValueError("an adapter is trained through the target, and there is no checkpoint of it")
        self._checkpoint = setup.checkpoint
        self._module = _AdaptedTarget(network, setup.decoder)
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            network = UnoAdapters(config, setup.embedding_and_head)
        return cls(setup, network, config, options)

    @property
    def module(self) -> nn.Module:
        """The target with its adapter."""
        return self._module

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
        states = network(batch.token, (anchor - 1).clamp(min=0), noise)[learned]
        draft, target = self.network.compute_logits(states, labels.candidates), labels.logits[row[learned]]
        place = learned.nonzero()[:, 2]
        metrics = {
            f"depth {i + 2} top 1": top1_agreement(draft[place == i].detach(), target[place == i])
            for i in range(o.depth - 1)
        }
        return Loss(mean_loss(draft, target, o.hard, o.objective), metrics)

    def method(self, network: Speculator) -> AnyMethod:
        """A dynamic tree, verified greedily. It is drafted with the adapter as it is written."""
        assert isinstance(network, UnoAdapters)
        s, options = self._setup, DFlashOptions(num_draft_tokens=MEASURE_TREE_NODES, num_steps=self.options.depth)
        with TemporaryDirectory() as folder:
            write_peft(Path(folder), network.adapters, s.config, s.card.name)
            return uno_method(self._checkpoint, s.network or s.decoder, folder, self._tokens, options)

    def usage(self, out: str) -> str:
        """The method that drafts with the adapter."""
        return f"--method pard --draft-model {out}"

    def save(self, folder: Path) -> None:
        """Write the adapter for further training, and in PEFT's format into `adapter/`."""
        super().save(folder)
        write_peft(folder / "adapter", self.network.adapters, self._setup.config, self._setup.card.name)
