"""Tunes a target to fork (APAR, arXiv 2401.06761) on the documents of `foretell data fork`."""

from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import nn

from foretell.accept import Match
from foretell.draft import NoDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.model.block.decoder import Decoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner
from foretell.model.training.full_forward import full_forward
from foretell.plan import AparPlan
from foretell.plan.control_tokens import ControlTokens, choose_control_tokens, with_control_tokens
from foretell.shape import RootOnly
from foretell.speculator.hf_writer import llama_config, write_hf
from foretell.speculator.network.apar import AparAdapters, AparConfig
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.low_rank import adapted_shapes
from foretell.tokenizer.codec import TextCodec
from foretell.train.data.batch import Batch
from foretell.train.recipe.base import MAX_WIDTH, Loss, MeasuredPlan, Recipe, RecipeOptions, RecipeSetup


class AparTraining(RecipeOptions):
    """Options of `--set`."""

    rank: int = Field(16, ge=1, le=MAX_WIDTH)
    """Rank of the adapters."""
    control_weight: float = Field(1.0, gt=0)
    """Weight of a control token in the loss, relative to that of another token."""


class _TunedTarget(nn.Module):
    """The target with its adapters: logits at the marked positions. The target is no submodule, so that it is neither
    optimised nor checkpointed.
    """

    def __init__(self, network: AparAdapters, decoder: Decoder) -> None:
        super().__init__()
        self.network, self._decoder = network, [decoder]

    def forward(self, token: Int[torch.Tensor, "b s"], mask: Bool[torch.Tensor, "b s"]) -> Float[torch.Tensor, "n v"]:
        """Logits after the marked tokens."""
        decoder = self._decoder[0]
        with self.network.adapters.applied_to(decoder):
            x = full_forward(decoder, self.network.embed_with_rows(decoder, token))
        return self.network.logits_with_rows(decoder, decoder.final_norm(x[mask]))


class AparRecipe(Recipe):
    """Cross-entropy of the next token. The result is another model, in the folder `target/`, whose tokenizer has the
    control tokens; the plan `apar` decodes it.
    """

    name = "apar"
    network: AparAdapters
    config: AparConfig

    def __init__(self, network: AparAdapters, config: AparConfig, setup: RecipeSetup, options: AparTraining) -> None:
        if setup.checkpoint is None or setup.codec is None:
            raise ValueError("a target is tuned through its checkpoint, and there is none")
        self.network, self.config, self._options = network, config, options
        self._module = _TunedTarget(network, setup.decoder)
        self._checkpoint = setup.checkpoint
        self._codec: TextCodec = with_control_tokens(setup.codec, ControlTokens(*config.tokens))
        self._context = setup.config.context

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build the adapters, which change nothing at first.

        Raises:
            ValueError: the target cannot be tuned or written, or its tokenizer has no free special tokens.
        """
        options = setup.parse_options(AparTraining)
        llama_config(setup.config)
        if setup.codec is None:
            raise ValueError("forking needs the target's tokenizer, and there is none")
        tokens = choose_control_tokens(setup.codec, setup.config.eos)
        shapes = adapted_shapes(setup.decoder)
        config = AparConfig(target=setup.card, rank=options.rank, shapes=shapes, tokens=(tokens.fork, tokens.child))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            network = AparAdapters(config, setup.embedding_and_head)
        return cls(network, config, setup, options)

    @property
    def module(self) -> nn.Module:
        """The target with its adapters."""
        return self._module

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The mean cross-entropy of the tokens to learn, and that of forks."""
        learned = batch.loss_mask[:, 1:]
        mask = F.pad(learned, (0, 1))
        label = batch.token[:, 1:][learned]
        losses = F.cross_entropy(network(batch.token, mask).float(), label, reduction="none")
        is_fork = label == self.config.tokens[0]
        weight = torch.where(is_fork, self._options.control_weight, 1.0)
        metrics = {"fork loss": float(losses[is_fork].detach().mean())} if is_fork.any() else {}
        return Loss((losses * weight).sum() / weight.sum(), metrics)

    def method(self, network: Speculator) -> AnyMethod:
        """Plain decoding: the plan is what is measured."""
        return Method(NoDrafter(), RootOnly(), Match())

    @property
    def measured_plan(self) -> MeasuredPlan:
        """The plan that decodes the tuned target."""
        return MeasuredPlan(AparPlan(), self._codec, self._context)

    def target_runner(self) -> Runner:
        """The tuned target."""
        return DecoderRunner(self._checkpoint.load_network(self.network.merge, "bfloat16"))

    def usage(self, out: str) -> str:
        """The tuned target, decoded by its plan."""
        return f"--model {out}/target --plan apar"

    def save(self, folder: Path) -> None:
        """Write the adapters, and the tuned target into `target/`."""
        super().save(folder)
        write_hf(folder / "target", self.network.merge(self._checkpoint.decoder(torch.float32)), self._codec)
