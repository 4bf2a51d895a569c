"""Adapters that make a target fork (APAR, arXiv 2401.06761): updates of matrices and of two rows of its embedding."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.network.base import Speculator, SpeculatorConfig
from foretell.speculator.network.low_rank import LoRAAdapters


class AparConfig(SpeculatorConfig):
    """Configuration of the adapters."""

    kind: Literal["apar"] = "apar"
    rank: int = Field(16, ge=1)
    shapes: tuple[tuple[int, int], ...]
    """Outputs and inputs of the adapted matrices."""
    tokens: tuple[int, int]
    """Ids of the fork and of the child token."""


class AparAdapters(Speculator):
    """Low-rank updates, and the rows of the control tokens in embedding and head, first those of a mean token.

    They draft nothing: merged into the target they make another model, which the plan `apar` decodes.
    """

    kind = "apar"

    def __init__(self, config: AparConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config.model_copy(update={"own_head": False, "draft_vocab": None}), embedding_and_head)
        self.adapters = LoRAAdapters(config.shapes, config.rank)
        self.inputs = nn.Parameter(_mean_row(embedding_and_head.embedding).repeat(2, 1))
        self.outputs = nn.Parameter(_mean_row(embedding_and_head.head).repeat(2, 1))
        self._is_tied = embedding_and_head.embedding.data_ptr() == embedding_and_head.head.data_ptr()
        self._tokens = config.tokens

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: training runs the target itself."""
        return ()

    def embed_with_rows(self, decoder: Decoder, token: Int[torch.Tensor, "b s"]) -> Float[torch.Tensor, "b s d"]:
        """The decoder's inputs, the control tokens with these rows."""
        x = decoder.embed(token.reshape(-1)).view(*token.shape, -1)
        for row, control in zip(self.inputs, self._tokens, strict=True):
            x = torch.where((token == control)[..., None], row * decoder.config.embedding_scale, x)
        return x

    def logits_with_rows(self, decoder: Decoder, states: Float[torch.Tensor, "n d"]) -> Float[torch.Tensor, "n v"]:
        """The decoder's logits, the control tokens with these rows."""
        logits, rows = decoder.logits(states), self.inputs if self._is_tied else self.outputs
        own = states.to(rows.dtype) @ rows.T
        columns = torch.tensor(self._tokens, device=logits.device)
        return logits.index_copy(1, columns, own.to(logits.dtype))

    @torch.no_grad()
    def merge(self, decoder: Decoder) -> Decoder:
        """Add the updates to a decoder, and set its rows of the control tokens."""
        decoder.embedding.data = self._with_rows(decoder.embedding.data, self.inputs)
        head = decoder.head.weight
        head.data = decoder.embedding.data if self._is_tied else self._with_rows(head.data, self.outputs)
        return self.adapters.merge(decoder)

    def _with_rows(self, matrix: Float[torch.Tensor, "v d"], rows: Float[torch.Tensor, "2 d"]) -> torch.Tensor:
        """A copy of a matrix, which other decoders share, with the rows of the control tokens."""
        out: torch.Tensor = matrix.clone()
        out[list(self._tokens)] = rows.to(out)
        return out


def _mean_row(matrix: Float[torch.Tensor, "v d"]) -> Float[torch.Tensor, "1 d"]:
    return matrix.detach().float().mean(0, keepdim=True)
