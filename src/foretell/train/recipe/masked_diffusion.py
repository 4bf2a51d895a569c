"""Adapts a target to a masked diffusion language model (DiffuLLaMA, arXiv 2410.17891; Dream, arXiv 2508.15487)."""

from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import checkpoint

from foretell.accept import Match
from foretell.catalogue.options.masked_diffusion import MaskedDiffusionOptions
from foretell.draft import MaskedDiffusionDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import Chain
from foretell.speculator.diffusion_writer import choose_mask_token, write_dream
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.masked_diffusion import MaskedDiffusion, MaskedDiffusionConfig
from foretell.train.data.batch import Batch
from foretell.train.objective.masking import annealed_attention, bound_weights, draw_masks
from foretell.train.recipe.base import Loss, Recipe, RecipeOptions, RecipeSetup

MODEL = "model"
"""Folder of the model beside the speculator's files."""


class MaskedDiffusionTraining(RecipeOptions):
    """Options of `--set`."""

    anneal: float = Field(0.5, ge=0, le=1)
    """Share of the training in which attention goes from causal to full."""
    mask_token: int | None = Field(None, ge=0)
    """Id of the mask token; None: the last special token that the chat template does not use."""


class MaskedDiffusionRecipe(Recipe):
    """Cross-entropy of masked tokens of answers, weighted to a bound of the likelihood. The prompt is never masked.

    Predictions are shifted: the output before a masked token predicts it, as before the adaptation.
    """

    name = "masked_diffusion"
    network: MaskedDiffusion
    config: MaskedDiffusionConfig

    def __init__(
        self,
        network: MaskedDiffusion,
        config: MaskedDiffusionConfig,
        options: MaskedDiffusionTraining,
        setup: RecipeSetup,
    ) -> None:
        self.network, self.config, self._options, self._codec = network, config, options, setup.codec
        self._progress = 0.0

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Copy the target.

        Raises:
            ValueError: unknown options, no free mask token, or a target that cannot be adapted.
        """
        options = setup.parse_options(MaskedDiffusionTraining)
        mask = options.mask_token
        if mask is None:
            if setup.codec is None:
                raise ValueError("without the target's tokenizer the mask token must be named: --set mask_token=ID")
            mask = choose_mask_token(setup.codec, setup.config.eos)
        if mask >= setup.config.vocab:
            raise ValueError(
                f"--set mask_token={mask}: outside the target's vocabulary, which has {setup.config.vocab} tokens"
            )
        config = MaskedDiffusionConfig(target=setup.card, model=setup.config, mask_token=mask)
        network = MaskedDiffusion(config, setup.embedding_and_head)
        if setup.checkpoint is not None:
            network.init_from_target(setup.decoder)
        return cls(network, config, options, setup)

    def set_progress(self, progress: float) -> None:
        """Attention depends on it."""
        self._progress = progress

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The bound per token of the answers, in nats."""
        learned = batch.loss_mask.clone()
        # Without a token before it, a shifted prediction has no output.
        learned[:, 0] = False
        masked = draw_masks(learned)
        anneal = self._options.anneal
        future = min(1.0, self._progress / anneal) if anneal else 1.0
        visible = _real(batch)
        logits = network(batch.token, masked, annealed_attention(visible, future))
        if not len(logits):
            return Loss(logits.sum(), {})
        label, weight = batch.token[masked], bound_weights(learned, masked)[masked]
        losses: torch.Tensor = checkpoint(_cross_entropy, logits, label, use_reentrant=False)
        top1 = float((logits.detach().argmax(-1) == label).float().mean())
        return Loss((losses * weight).sum() / learned.sum(), {"top 1": top1, "future": future})

    def method(self, network: Speculator) -> AnyMethod:
        """A greedy chain of one block, predicted in one pass."""
        assert isinstance(network, MaskedDiffusion)
        length = MaskedDiffusionOptions().block_length
        return Method(MaskedDiffusionDrafter(network.to_predictor(), length), Chain(length, draw=False), Match())

    def save(self, folder: Path) -> None:
        """Write the drafter, and the model into `model/`."""
        super().save(folder)
        write_dream(folder / MODEL, self.network, self._codec)

    def usage(self, out: str) -> str:
        """Both uses."""
        return f"--method masked_diffusion --draft-model {out}, or foretell diffusion generate --model {out}/{MODEL}"


def _real(batch: Batch) -> Bool[torch.Tensor, "b s"]:
    """Up to the last token to learn of each row: padding is behind it."""
    last: torch.Tensor = batch.loss_mask.flip(1).cumsum(1).flip(1) > 0
    return last


def _cross_entropy(logits: Float[torch.Tensor, "k v"], label: torch.Tensor) -> Float[torch.Tensor, " k"]:
    return F.cross_entropy(logits.float(), label, reduction="none")
