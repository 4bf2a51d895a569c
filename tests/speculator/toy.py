"""A speculator of one matrix, so that lookups and formats can be tested without a real network."""

from typing import Literal

import torch
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig
from foretell.model.load.checkpoint import Checkpoint
from foretell.speculator.network.base import Speculator, SpeculatorConfig, TargetInfo
from foretell.testing import TINY, RandomWeights, tiny_decoder


class ToyConfig(SpeculatorConfig):
    kind: Literal["toy"] = "toy"


class Toy(Speculator):
    kind = "toy"

    def __init__(self, config: SpeculatorConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.layer = nn.Linear(embedding_and_head.hidden, embedding_and_head.hidden, bias=False)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()


class TinySource(Checkpoint):
    """The checkpoint of a tiny decoder."""

    def __init__(self, config: ModelConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, RandomWeights(seed), torch.device("cpu"))
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def load_network(self, change: object, dtype: str | None = None) -> object:  # type: ignore[override]
        raise NotImplementedError


def card_of(source: Checkpoint, name: str = "tiny", fingerprint: str | None = None) -> TargetInfo:
    c = source.config
    mark = source.fingerprint() if fingerprint is None else fingerprint
    return TargetInfo(name=name, fingerprint=mark, hidden=c.hidden, vocab=c.vocab, layers=c.layers)


TARGET = tiny_decoder()
