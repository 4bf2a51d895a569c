"""PARD: a draft model that drafts all tokens in one pass, with mask tokens in place of those that do not exist yet."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator

from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.base import check_mask_token
from foretell.speculator.network.block_attention import RolloutAttention
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork


class PardConfig(DraftModelConfig):
    """Configuration of a PARD draft model."""

    kind: Literal["pard"] = "pard"
    depth: int = Field(6, ge=2, le=64)
    """Tokens that are drafted in one pass."""
    mask_token: int = Field(ge=0)
    """Token that stands for a token that does not exist yet."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        c = self.model
        check_mask_token(self.mask_token, self.target.vocab)
        if c.chunked or c.attention_softcap or c.query_scaling is not None or c.scale != c.head_dim**-0.5:
            raise ValueError(
                "PARD is not supported for targets with windows that begin at fixed places, or with scores that are "
                "scaled or bounded in another way than Llama's; train p_eagle, or a draft_model"
            )
        return self


class PardNetwork(DraftNetwork):
    """PARD (arXiv 2504.18583): the last token predicts the next one, as in any draft model; `depth - 1` mask tokens
    after it predict those that follow. A mask attends to the text and to the masks before it.
    """

    kind = "pard"
    config: PardConfig
    starts_from: ClassVar[tuple[str, ...]] = ("draft_model",)

    @property
    def depth(self) -> int:
        """Tokens that are drafted in one pass."""
        return self.config.depth

    def forward(  # type: ignore[override]
        self,
        token: Int[torch.Tensor, "b s"],
        anchor: Int[torch.Tensor, "b a"],
        wanted: Sequence[Bool[torch.Tensor, "b _"]],
    ) -> tuple[Float[torch.Tensor, "_ d"], ...]:
        """Inputs of the output head at every depth. `wanted[0]` [b, s] marks the positions whose prediction of the next
        token is needed; `wanted[i]` [b, a] the rollouts after the positions `anchor` whose mask `i` is.
        """
        (b, s), a, masks = token.shape, anchor.shape[1], self.depth - 1
        after = anchor[..., None] + torch.arange(1, self.depth, device=token.device)
        position = torch.cat((torch.arange(s, device=token.device).expand(b, -1), after.flatten(1)), 1)
        inputs = torch.cat((token, torch.full_like(after.flatten(1), self.config.mask_token)), 1)
        attention = RolloutAttention(s, anchor, self.model.window_of)
        # Masks near the end of the context may stand beyond it; nothing is learned there.
        position = position.clamp_max(self.model.context - 1)
        x = self.norm(forward_blocks(self.blocks, self.model, self.ropes(), self.embed(inputs), 0, attention, position))
        rollouts = x[:, s:].unflatten(1, (a, masks))
        return x[:, :s][wanted[0]], *(rollouts[:, :, i][mask] for i, mask in enumerate(wanted[1:]))
