"""A masked diffusion language model between an autoregressive model's embedding and head, from which it is adapted."""

from dataclasses import replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.diffusion.attention import MaskedAttention
from foretell.model.diffusion.config import DiffusionConfig
from foretell.model.diffusion.predictor import MaskPredictor
from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.blocks import BlocksConfig, BlocksNetwork, blank_norm


class MaskedDiffusionConfig(BlocksConfig):
    """Configuration of a masked diffusion model that drafts for an autoregressive one."""

    kind: Literal["masked_diffusion"] = "masked_diffusion"
    mask_token: int = Field(ge=0)
    """Id of the mask token in the target's vocabulary."""
    shifted: bool = True
    """See `DiffusionConfig`."""
    block: int = Field(0, ge=0)
    """See `DiffusionConfig`."""
    own_embedding: bool = False
    """Whether it has an embedding of its own, as published models have; else the target's and a row for the mask."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.diffusion  # noqa: B018 (raises for what cannot be run)
        return self

    @property
    def diffusion(self) -> DiffusionConfig:
        """What predicts masked tokens."""
        return DiffusionConfig(self.model, self.mask_token, self.shifted, self.block)


class MaskedDiffusion(BlocksNetwork):
    """A decoder whose attention is not causal: it predicts masked tokens from the tokens on both sides.

    Its blocks, its final norm and the mask's embedding are trained and stored.
    """

    kind = "masked_diffusion"
    config: MaskedDiffusionConfig

    def __init__(self, config: MaskedDiffusionConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.model = replace(self.model, tied=False)
        self.norm = blank_norm(config.model)
        row = embedding_and_head.embedding.detach().float()
        self.mask_embedding = nn.Parameter(row.mean(0))
        self.own_embedding: nn.Parameter | None
        self.register_parameter("own_embedding", nn.Parameter(row.clone()) if config.own_embedding else None)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: it reads tokens only."""
        return ()

    @torch.no_grad()
    def init_from_target(self, target: Decoder) -> None:
        """Copy all blocks of the target and its final norm; the mask begins as a mean token."""
        for mine, theirs in zip(self.blocks, target.blocks, strict=True):
            mine.load_state_dict(theirs.state_dict())
        self.norm.load_state_dict(target.norm.state_dict())

    def forward(
        self,
        token: Int[torch.Tensor, "b s"],
        masked: Bool[torch.Tensor, "b s"],
        attended: Bool[torch.Tensor, "#b 1 s s"] | None,
    ) -> Float[torch.Tensor, "k v"]:
        """Logits of the masked tokens, sequence by sequence; `attended`: which positions each position attends to."""
        inputs = torch.where(masked[..., None], self.mask_embedding * self.embedding_scale, self._embed(token))
        attention = MaskedAttention(self.model, attended)
        x = forward_blocks(self.blocks, self.model, self.ropes(), inputs, 0, attention)
        # The output before a masked token predicts it, where predictions are shifted.
        rows = F.pad(masked[:, 1:], (0, 1)) if self.config.shifted else masked
        return self.compute_logits(self.norm(x[rows]))

    def _embed(self, token: Int[torch.Tensor, "b s"]) -> Float[torch.Tensor, "b s d"]:
        if self.own_embedding is None:
            return self.embed(token)
        return F.embedding(token, self.own_embedding) * self.embedding_scale

    def to_decoder(self, dtype: torch.dtype) -> Decoder:
        """A copy as a decoder, whose embedding has the mask's row."""
        table = self.get_buffer("_embedding") if self.own_embedding is None else self.own_embedding.detach()
        embedding = table.to(dtype, copy=True)
        if self.own_embedding is None:
            embedding[self.config.mask_token] = self.mask_embedding.detach().to(embedding)
        return self.decoder(self.norm, dtype, embedding)

    def to_predictor(self, dtype: torch.dtype | None = None) -> MaskPredictor:
        """A copy that predicts masked tokens, in the dtype of the target's embedding unless another is given."""
        decoder = self.to_decoder(dtype or self.get_buffer("_embedding").dtype)
        return MaskPredictor(decoder, self.config.mask_token, self.config.shifted, self.config.block)
