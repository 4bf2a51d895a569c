"""Look-ahead embeddings on a frozen target (PaSS)."""

from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from foretell.catalogue.options import LookAheadEmbeddingsOptions
from foretell.catalogue.parallel_decoding import parallel_method
from foretell.engine.method import AnyMethod
from foretell.model.decoder import Decoder
from foretell.model.training.probe_forward import probe_forward
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.look_ahead import LookAheadConfig, LookAheadEmbeddings
from foretell.train.data.batch import Batch
from foretell.train.objective.heads import cross_entropies, ranks, weights
from foretell.train.objective.look_ahead import answers_ahead, cut_points
from foretell.train.recipe.base import MAX_COUNT, Loss, Recipe, Setup


class LookAheadOptions(BaseModel):
    """What `--set` may say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ahead: int = Field(4, ge=1, le=MAX_COUNT)
    """Look-ahead embeddings: tokens guessed after the target's own next one."""
    cuts: int = Field(32, ge=1)
    """Places of every text after which the target looks ahead."""
    decay: float = Field(1.0, gt=0, le=1)
    """Weight of a place ahead relative to the one before it."""
    pace: float = Field(10.0, gt=0)
    """Learning rate of the vectors relative to the trainer's: inputs of a whole network move slowly."""


class LookAheadRecipe(Recipe):
    """Cross-entropy at the vectors after drawn places of every text; the target, which is run forward and backward,
    stays as it is.
    """

    name = "pass"
    network: LookAheadEmbeddings
    config: LookAheadConfig

    def __init__(
        self, network: LookAheadEmbeddings, config: LookAheadConfig, setup: Setup, options: LookAheadOptions
    ) -> None:
        if setup.source is None:
            raise ValueError("look-ahead embeddings learn through the whole target, whose checkpoint is not at hand")
        self.network, self.config, self._options = network, config, options
        # Not a module of its own, so that no trainer wraps or saves it.
        self._target: Decoder = setup.decoder
        self._weights = torch.tensor(weights(options.ahead, options.decay))
        self._number = setup.draft_index()

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """Vectors that look like a token of no meaning in particular."""
        options = setup.parse(LookAheadOptions)
        config = LookAheadConfig(target=setup.card, draft_vocab=setup.draft_vocab, ahead=options.ahead)
        network = LookAheadEmbeddings(config, setup.ends)
        setup.choose(network)
        return cls(network, config, setup, options)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: the target is run here."""
        return ()

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The weighted mean of the cross-entropies of each place ahead."""
        drawn = torch.rand(batch.answer.shape).to(batch.token.device)
        cut = cut_points(batch.answer, self._options.cuts, drawn)
        number = None if self._number is None else self._number.to(batch.token.device)
        wanted = answers_ahead(batch.token, batch.answer, cut, self._options.ahead, number).flatten(0, 1)
        states = probe_forward(self._target, batch.token, cut, network()).flatten(0, 1)
        logits = self.network.score(states)
        losses, found = cross_entropies(logits, wanted), ranks(logits.detach(), wanted)
        figures = dict[str, float]()
        for i, loss in enumerate(losses.detach().tolist()):
            figures[f"ahead {i + 1} loss"] = loss
            known = wanted[:, i] >= 0
            figures[f"ahead {i + 1} top 1"] = float((found[known, i] == 0).float().mean()) if known.any() else 0.0
        weight = self._weights.to(losses)
        return Loss((losses * weight).sum() / weight.sum(), figures)

    def method(self, network: Speculator) -> AnyMethod:
        """The best guess of every place ahead, matched."""
        assert isinstance(network, LookAheadEmbeddings)
        return parallel_method(network, LookAheadEmbeddingsOptions(draft_sample_method="greedy"))

    def groups(self) -> list[dict[str, object]]:
        """The vectors, at their own pace."""
        return [{"params": list(self.network.parameters()), "lr_scale": self._options.pace}]
