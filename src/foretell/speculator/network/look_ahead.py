"""Look-ahead embeddings: inputs that make the target itself guess several tokens ahead in one pass."""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import nn

from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import Speculator, SpeculatorConfig


class LookAheadConfig(SpeculatorConfig):
    """How far ahead is looked."""

    kind: Literal["pass"] = "pass"
    ahead: int = Field(4, ge=0)
    """Look-ahead embeddings: tokens guessed after the target's own next one."""


class LookAheadEmbeddings(Speculator):
    """One vector per place ahead, read by the target in the place of a token that is not known yet (PaSS: Monea et al.,
    arXiv 2311.13581).

    Vector `i` (from 1) stands `i` places after the last token and sees it, what precedes it and the vectors before its
    own; the state it ends in scores the token `i + 1` places after that one. All start as the mean token embedding, at
    the length that token embeddings have. The vocabulary is untouched: these are rows of a table beside it.
    """

    kind = "pass"

    def __init__(self, config: LookAheadConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config.model_copy(update={"own_head": False}), embedding_and_head)
        self.ahead = config.ahead
        self.vectors = nn.Parameter(_typical(embedding_and_head).repeat(config.ahead, 1))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the target's head would see at the vectors."""
        return (self.target_info.layers + 1,)

    def forward(self) -> Float[torch.Tensor, "l d"]:
        """What the target's first block sees in the places ahead."""
        return self.vectors


def _typical(embedding_and_head: EmbeddingAndHead) -> Float[torch.Tensor, "1 d"]:
    """The mean direction of token embeddings with their mean length, as the first block sees it, float32."""
    table = embedding_and_head.embedding.detach().float()
    mean = table.mean(0, keepdim=True)
    return mean * (table.norm(dim=-1).mean() / mean.norm().clamp_min(1e-9)) * embedding_and_head.embedding_scale
