"""Look-ahead embeddings on a frozen target, and their labels (PaSS, arXiv 2311.13581)."""

from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import nn

from foretell.catalogue.options.parallel_decoding import LookAheadEmbeddingsOptions
from foretell.catalogue.parallel_decoding import parallel_method
from foretell.engine.method import AnyMethod
from foretell.model.block.decoder import Decoder
from foretell.model.training.probe_forward import probe_forward
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.look_ahead import LookAheadConfig, LookAheadEmbeddings
from foretell.train.data.batch import Batch
from foretell.train.objective.heads import cross_entropies, label_ranks, loss_weights
from foretell.train.recipe.base import MAX_COUNT, Loss, Recipe, RecipeOptions, RecipeSetup


def sample_cut_points(
    loss_mask: Bool[torch.Tensor, "b s"], count: int, score: Float[torch.Tensor, "b s"]
) -> Int[torch.Tensor, "b g"]:
    """Per sequence up to `count` distinct positions after which to look ahead.

    A position can be chosen if the token two positions later is to be learned; those of the highest `score` are. Where
    a sequence has fewer, the remaining positions have no labels.
    """
    allowed = torch.zeros_like(loss_mask)
    allowed[:, :-2] = loss_mask[:, 2:]
    return torch.where(allowed, score, -1.0).topk(min(count, loss_mask.shape[1]), dim=1).indices


def look_ahead_labels(
    token: Int[torch.Tensor, "b s"],
    loss_mask: Bool[torch.Tensor, "b s"],
    cut: Int[torch.Tensor, "b g"],
    ahead: int,
    draft_index: Int[torch.Tensor, " v"] | None = None,
) -> Int[torch.Tensor, "b g l"]:
    """Label of vector `i` (from 0) after each cut point: the token at `cut + 2 + i`; -1: none.

    A cut point has no labels if its first one is not to be learned. `draft_index`: index of every token in the draft
    vocabulary, -1 for tokens that are not in it; None: all are.
    """
    s = token.shape[1]
    position = cut[:, :, None] + 2 + torch.arange(ahead, device=cut.device)
    flat = position.clamp(max=s - 1).flatten(1)
    learned = loss_mask.gather(1, flat).view(position.shape) & (position < s)
    label = token.gather(1, flat).view(position.shape)
    return torch.where(learned & learned[:, :, :1], label if draft_index is None else draft_index[label], -1)


class LookAheadTraining(RecipeOptions):
    """Options of `--set`."""

    ahead: int = Field(4, ge=1, le=MAX_COUNT)
    """Look-ahead embeddings: tokens predicted after the target's own next token."""
    cuts: int = Field(32, ge=1)
    """Positions per sequence after which the target looks ahead."""
    decay: float = Field(1.0, gt=0, le=1)
    """Weight of a look-ahead position relative to the previous one."""
    pace: float = Field(10.0, gt=0)
    """Learning rate of the embeddings relative to the trainer's; inputs of a frozen network need a higher one."""


class LookAheadRecipe(Recipe):
    """Cross-entropy at the look-ahead embeddings after random positions of every sequence.

    The target runs forward and backward, and is frozen (PaSS, arXiv 2311.13581).
    """

    name = "pass"
    network: LookAheadEmbeddings
    config: LookAheadConfig

    def __init__(
        self, network: LookAheadEmbeddings, config: LookAheadConfig, setup: RecipeSetup, options: LookAheadTraining
    ) -> None:
        if setup.checkpoint is None:
            raise ValueError("look-ahead embeddings are trained through the target, and there is no checkpoint of it")
        self.network, self.config, self._options = network, config, options
        # Not part of `module`, so the trainer neither wraps nor saves it.
        self._target: Decoder = setup.decoder
        self._weights = torch.tensor(loss_weights(options.ahead, options.decay))
        self._draft_index = setup.draft_index()

    @classmethod
    def build(cls, setup: RecipeSetup) -> Self:
        """Build the embeddings."""
        options = setup.parse_options(LookAheadTraining)
        config = setup.configuration(LookAheadConfig, options)
        return cls(setup.create_network(LookAheadEmbeddings, config), config, setup, options)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: the recipe runs the target itself."""
        return ()

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The weighted mean of the cross-entropies of the look-ahead positions."""
        score = torch.rand(batch.loss_mask.shape).to(batch.token.device)
        cut = sample_cut_points(batch.loss_mask, self._options.cuts, score)
        draft_index = None if self._draft_index is None else self._draft_index.to(batch.token.device)
        labels = look_ahead_labels(batch.token, batch.loss_mask, cut, self._options.ahead, draft_index).flatten(0, 1)
        states = probe_forward(self._target, batch.token, cut, network()).flatten(0, 1)
        logits = self.network.compute_logits(states)
        losses, ranks = cross_entropies(logits, labels), label_ranks(logits.detach(), labels)
        metrics = dict[str, float]()
        for i, loss in enumerate(losses.detach().tolist()):
            metrics[f"ahead {i + 1} loss"] = loss
            known = labels[:, i] >= 0
            metrics[f"ahead {i + 1} top 1"] = float((ranks[known, i] == 0).float().mean()) if known.any() else 0.0
        weight = self._weights.to(losses)
        return Loss((losses * weight).sum() / weight.sum(), metrics)

    def method(self, network: Speculator) -> AnyMethod:
        """Greedy drafts from all look-ahead positions."""
        assert isinstance(network, LookAheadEmbeddings)
        return parallel_method(network, LookAheadEmbeddingsOptions(draft_sample_method="greedy"))

    def parameter_groups(self) -> list[dict[str, object]]:
        """The embeddings, with their own learning rate."""
        return [{"params": list(self.network.parameters()), "lr_scale": self._options.pace}]
