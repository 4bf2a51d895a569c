"""What the recipes of Medusa's and of blockwise heads share: positions, tokens to guess, figures, and the tree that is earned on the way."""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.catalogue.heads import heads_method
from foretell.config import SpeculativeConfig
from foretell.draft.network.base import Speculator
from foretell.draft.network.heads import HeadsConfig, HeadsNetwork
from foretell.method import AnyMethod
from foretell.shape import PathCounts
from foretell.train.batch import Batch
from foretell.train.objective.heads import Targets, cross_entropies, ranks, soft_cross_entropies, targets
from foretell.train.recipe.base import Loss, Recipe, Setup

_NOTED = 8
"""Batches from one note of the tree to the next."""


class HeadsRecipe(Recipe):
    """Trains heads at some positions of every batch, from tokens or (`soft`) from the target's own distributions over them."""

    network: HeadsNetwork
    config: HeadsConfig

    def __init__(self, setup: Setup, network: HeadsNetwork, positions: int, soft: bool) -> None:
        self.network, self.config = network, network.config
        self._positions, self._soft = positions, soft
        self._number = _numbers(setup)
        self._teacher = (
            setup.ends.head if setup.kept is None else setup.ends.head[setup.kept.to(setup.ends.head.device)]
        )
        self._cap = setup.ends.softcap
        self._counts, self._batches = PathCounts(), 0

    @abstractmethod
    def total(self, losses: Float[torch.Tensor, " k"]) -> Float[torch.Tensor, ""]:
        """What is minimised, from the loss of every head."""

    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """Cross-entropies of the heads at drawn positions."""
        wanted = self.wanted(batch)
        h = batch.features[0]
        return self.judged(network(h[wanted.row, wanted.place]), wanted, h)

    def wanted(self, batch: Batch) -> Targets:
        """The positions, and what is to be guessed there."""
        number = None if self._number is None else self._number.to(batch.token.device)
        return targets(batch.token, batch.answer, self.network.heads, number, self._positions)

    def judged(self, logits: Float[torch.Tensor, "n k w"], wanted: Targets, h: Float[torch.Tensor, "b s d"]) -> Loss:
        """The loss of these guesses. `h`: the target's states, for what it thought of the tokens to be guessed."""
        losses = self._losses(logits, wanted, h)
        figures = {f"head {i + 1} loss": x for i, x in enumerate(losses.detach().tolist())}
        found = ranks(logits.detach(), wanted.token)
        self._watch(found, wanted)
        for i in range(self.network.heads):
            places = found[wanted.known[:, i], i]
            for best in (1, 3):
                figures[f"head {i + 1} top {best}"] = float((places < best).float().mean()) if len(places) else 0.0
        return Loss(self.total(losses), figures)

    def _watch(self, found: Int[torch.Tensor, "n k"], wanted: Targets) -> None:
        """Count which paths came true, and note the best tree now and then: it is measured, saved and averaged with the weights."""
        self._counts.add(found.cpu().numpy(), wanted.known.cpu().numpy())
        if self._batches % _NOTED == 0:
            self.network.earn(*self._counts.best())
        self._batches += 1

    def _losses(self, logits: torch.Tensor, wanted: Targets, h: torch.Tensor) -> Float[torch.Tensor, " k"]:
        if not self._soft:
            return cross_entropies(logits, wanted.token)
        with torch.no_grad():
            # The state one position before a token gave the target's distribution over it.
            ahead = wanted.place[:, None] + torch.arange(1, self.network.heads + 1, device=h.device)
            before = h[wanted.row[:, None], ahead.clamp_max(h.shape[1] - 1)]
            teacher = F.linear(before, self._teacher.to(before)).float()
            teacher = torch.tanh(teacher / self._cap) * self._cap if self._cap else teacher
        return soft_cross_entropies(logits, teacher, wanted.token >= 0)

    def method(self, network: Speculator) -> AnyMethod:
        """The earned tree, matched."""
        assert isinstance(network, HeadsNetwork)
        return heads_method(network, SpeculativeConfig())


def _numbers(setup: Setup) -> Int[torch.Tensor, " v"] | None:
    """Place of every token among the drafted ones, -1 for the others; None: all are drafted."""
    if setup.kept is None:
        return None
    out = torch.full((setup.card.vocab,), -1)
    out[setup.kept.cpu()] = torch.arange(len(setup.kept))
    return out


def initial(setup: Setup, network: HeadsNetwork) -> None:
    """Give fresh heads the tokens that are drafted."""
    if setup.kept is not None:
        network.choose(setup.kept)
