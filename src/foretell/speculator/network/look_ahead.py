"""Look-ahead embeddings of PaSS: learned inputs with which the target predicts several tokens in one pass."""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import Speculator, SpeculatorConfig


class LookAheadConfig(SpeculatorConfig):
    """Configuration of look-ahead embeddings."""

    kind: Literal["pass"] = "pass"
    ahead: int = Field(4, ge=0)
    """Number of look-ahead embeddings: tokens drafted after the target's own next token."""


class LookAheadEmbeddings(Speculator):
    """One embedding per position ahead, which the target reads in place of a token that is not known yet (PaSS: Monea
    et al., arXiv 2311.13581).

    Embedding `i` (from 1) is `i` positions after the last token and attends to it, to what precedes it and to the
    embeddings before its own; its final hidden state predicts the token `i + 1` positions after the last one. All are
    initialised to the mean token embedding, scaled to the mean norm. They are no part of the vocabulary.
    """

    kind = "pass"

    def __init__(self, config: LookAheadConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config.model_copy(update={"own_head": False}), embedding_and_head)
        self.ahead = config.ahead
        self.vectors = nn.Parameter(_mean_embedding(embedding_and_head).repeat(config.ahead, 1))

    def forward(self) -> Float[torch.Tensor, "l d"]:
        """The inputs of the target's first block at the positions ahead."""
        return self.vectors


def _mean_embedding(embedding_and_head: EmbeddingAndHead) -> Float[torch.Tensor, "1 d"]:
    """The mean direction of the scaled token embeddings with their mean norm, float32."""
    table = embedding_and_head.embedding.detach().float()
    mean = table.mean(0, keepdim=True)
    return mean * (table.norm(dim=-1).mean() / mean.norm().clamp_min(1e-9)) * embedding_and_head.embedding_scale
