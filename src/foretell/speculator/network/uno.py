"""Adapters with which a target drafts over random tokens (UNO, arXiv 2609.04010)."""

from typing import Literal

from pydantic import Field

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import Speculator, SpeculatorConfig
from foretell.speculator.network.low_rank import LoRAAdapters


class UnoConfig(SpeculatorConfig):
    """Configuration of the adapters."""

    kind: Literal["uno"] = "uno"
    rank: int = Field(16, ge=1)
    shapes: tuple[tuple[int, int], ...]
    """Outputs and inputs of the adapted matrices."""


class UnoAdapters(Speculator):
    """Low-rank updates of the target's linear layers, which random tokens behind a text alone are read with.

    Training starts from this network; the method `pard` drafts with the same updates in PEFT's format.
    """

    kind = "uno"

    def __init__(self, config: UnoConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.adapters = LoRAAdapters(config.shapes, config.rank)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: training runs the target itself."""
        return ()
