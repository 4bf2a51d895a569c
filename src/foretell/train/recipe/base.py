"""The contract of a recipe: what a speculator is, what it is to learn from a batch, and how it is measured."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import nn

from foretell.draft.network.base import Speculator
from foretell.method import AnyMethod
from foretell.train.batch import Batch


@dataclass(frozen=True)
class Loss:
    """What is minimised, and figures to draw beside it (detached scalars: a loss per head, top-1 accuracies …)."""

    total: Float[torch.Tensor, ""]
    figures: dict[str, float]


class Recipe(ABC):
    """How one kind of speculator is trained. A new one is a file in this folder and a line in `RECIPES`."""

    name: ClassVar[str]
    """As `foretell train NAME` says it; equal to the catalogue's where there is one such method."""
    network: Speculator

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that batches must bring."""
        return self.network.taps

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch. `network` is `self.network` as the trainer wrapped it (data parallel, sharded): call nothing but its `forward`."""

    @abstractmethod
    def method(self, network: Speculator) -> AnyMethod:
        """How the speculator is decoded with when tokens per pass are measured: greedy, lossless, its default tree."""

    def groups(self) -> Sequence[dict[str, object]]:
        """Parameter groups of the optimizer with learning rates relative to the trainer's (`lr_scale`)."""
        return [{"params": [p for p in self.network.parameters() if p.requires_grad], "lr_scale": 1.0}]

    def stage(self, progress: float) -> None:
        """Told before every step how much of the training is done (0 to 1); recipes of several stages switch here."""
        return
