"""PARD: a draft model that drafts all tokens in one pass, with mask tokens in place of those that do not exist yet."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.load.pard2 import STATE_SCALE, StateProjection
from foretell.model.training.full_forward import forward_blocks
from foretell.speculator.network.base import Speculator, check_mask_token
from foretell.speculator.network.block_attention import RolloutAttention
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork


class PardConfig(DraftModelConfig):
    """Configuration of a PARD draft model."""

    kind: Literal["pard"] = "pard"
    depth: int = Field(6, ge=2, le=64)
    """Tokens that are drafted in one pass."""
    mask_token: int = Field(ge=0)
    """Token that stands for a token that does not exist yet."""

    state_layers: tuple[int, ...] = ()
    """PARD-2: hidden layers of the target that are added to the tokens; empty: none, PARD."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        c, n = self.model, self.target.layers
        if not all(0 <= layer <= n + 1 and layer != n for layer in self.state_layers):
            raise ValueError(
                f"state_layers should be hidden layers 0 to {n - 1} of the target, or {n + 1} after its final norm, "
                f"found {list(self.state_layers)}"
            )
        check_mask_token(self.mask_token, self.target.vocab)
        if c.chunked or c.attention_softcap or c.query_scaling is not None or c.scale != c.head_dim**-0.5:
            raise ValueError(
                "PARD is not supported for targets with windows that begin at fixed places, or with scores that are "
                "scaled or bounded in another way than Llama's; train p_eagle, or a draft_model"
            )
        return self


class PardNetwork(DraftNetwork):
    """PARD (arXiv 2504.18583): the last token predicts the next one, as in any draft model; `depth - 1` mask tokens
    after it predict those that follow. A mask attends to the text and to the masks before it. PARD-2 (arXiv
    2605.08632) adds to the tokens what the target's hidden states give.
    """

    kind = "pard"
    config: PardConfig
    starts_from: ClassVar[tuple[str, ...]] = ("draft_model",)

    def __init__(self, config: PardConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        d, count = config.target.hidden, len(config.state_layers)
        self.target_proj = nn.Linear(count * d, d, bias=False) if count else None
        if self.target_proj is not None:
            nn.init.zeros_(self.target_proj.weight)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The input of the target's head, the teacher, and the layers that PARD-2 reads."""
        teacher = super().hidden_layers
        return (*teacher, *(layer for layer in self.config.state_layers if layer not in teacher))

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """Hidden states that the smaller network does not read contribute nothing."""
        own = {} if self.target_proj is None else {"target_proj.weight": torch.zeros_like(self.target_proj.weight)}
        return own | super().adapt_state_dict(smaller)

    @property
    def state_projection(self) -> StateProjection | None:
        """What PARD-2 adds to the tokens; None: nothing."""
        if self.target_proj is None:
            return None
        weight = self.target_proj.weight.detach().float().cpu() * STATE_SCALE
        return StateProjection(self.config.state_layers, weight, torch.zeros(len(weight)))

    @property
    def depth(self) -> int:
        """Tokens that are drafted in one pass."""
        return self.config.depth

    def forward(  # type: ignore[override]
        self,
        token: Int[torch.Tensor, "b s"],
        anchor: Int[torch.Tensor, "b a"],
        wanted: Sequence[Bool[torch.Tensor, "b _"]],
        states: Float[torch.Tensor, "b s k"] | None = None,
    ) -> tuple[Float[torch.Tensor, "_ d"], ...]:
        """Inputs of the output head at every depth. `wanted[0]` [b, s] marks the positions whose prediction of the next
        token is needed; `wanted[i]` [b, a] the rollouts after the positions `anchor` whose mask `i` is. `states`: the
        target's hidden states that PARD-2 reads, concatenated; None: none.
        """
        (b, s), a, masks = token.shape, anchor.shape[1], self.depth - 1
        after = anchor[..., None] + torch.arange(1, self.depth, device=token.device)
        position = torch.cat((torch.arange(s, device=token.device).expand(b, -1), after.flatten(1)), 1)
        inputs = torch.cat((token, torch.full_like(after.flatten(1), self.config.mask_token)), 1)
        attention = RolloutAttention(s, anchor, self.model.window_of)
        # Masks near the end of the context may stand beyond it; nothing is learned there.
        position = position.clamp_max(self.model.context - 1)
        x = self.embed(inputs)
        if self.target_proj is not None and states is not None:
            # A token reads the states at the token before it, and masks what the last token reads.
            added = F.pad(self.target_proj(states.to(self.dtype)) * STATE_SCALE, (0, 0, 1, -1))
            last = anchor[..., None].expand_as(after).flatten(1)[..., None].expand(-1, -1, added.shape[-1])
            x = x + torch.cat((added, added.gather(1, last)), 1)
        x = self.norm(forward_blocks(self.blocks, self.model, self.ropes(), x, 0, attention, position))
        rollouts = x[:, s:].unflatten(1, (a, masks))
        return x[:, :s][wanted[0]], *(rollouts[:, :, i][mask] for i, mask in enumerate(wanted[1:]))
