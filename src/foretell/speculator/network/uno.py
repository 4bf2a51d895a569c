"""Adapters with which a target drafts over random tokens (UNO, arXiv 2609.04010)."""

from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.training.probe_forward import probe_forward
from foretell.speculator.network.base import Speculator, SpeculatorConfig
from foretell.speculator.network.low_rank import LoRAAdapters


class UnoConfig(SpeculatorConfig):
    """Configuration of the adapters; `shapes`: outputs and inputs of the adapted matrices."""

    kind: Literal["uno"] = "uno"
    rank: int = Field(16, ge=1)
    shapes: tuple[tuple[int, int], ...]


class UnoAdapters(Speculator):
    """Low-rank updates of the target's linear layers, which random tokens behind a text alone are read with.

    The method `pard` drafts with the same updates in PEFT's format.
    """

    kind = "uno"

    def __init__(self, config: UnoConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.adapters = LoRAAdapters(config.shapes, config.rank)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: training runs the target itself."""
        return ()

    def forward(
        self,
        target: Decoder,
        token: Int[torch.Tensor, "b s"],
        cut: Int[torch.Tensor, "b g"],
        noise: Int[torch.Tensor, "b g l"],
    ) -> Float[torch.Tensor, "b g l d"]:
        """Inputs of the target's head at the random tokens behind every cut; see `probe_forward`."""
        inputs = target.embed(noise.flatten()).view(*noise.shape, -1)
        return probe_forward(target, token, cut, inputs, partial(self.adapters.applied_to, target))
