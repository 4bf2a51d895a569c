"""P-EAGLE: EAGLE-3's layers that draft all tokens in one pass, with masks in place of the tokens and features that
do not exist yet.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import nn

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.speculator.network.base import Speculator, TokenSubset
from foretell.speculator.network.block_attention import RolloutAttention
from foretell.speculator.network.cached_layers import EXTRA_POSITIONS
from foretell.speculator.network.eagle import Eagle3, EagleConfig


class PEagleConfig(EagleConfig):
    """Configuration of a P-EAGLE speculator."""

    kind: Literal["p_eagle"] = "p_eagle"
    depth: int = Field(7, ge=2, le=EXTRA_POSITIONS)
    """Tokens that are drafted in one pass."""
    mask_token: int | None = Field(None, ge=0)
    """Published checkpoints: the token in whose place the mask's embedding stood; None: it is no token's."""


class PEagle(Eagle3):
    """P-EAGLE (arXiv 2602.01469): the last decided token with its feature predicts the next one, as in EAGLE-3; `depth
    - 1` masks at the positions after it predict those that follow. A mask is a learned embedding with a learned feature
    and attends to what was read and to the masks before it.
    """

    kind = "p_eagle"
    starts_from: ClassVar[tuple[str, ...]] = ("eagle3",)
    config: PEagleConfig

    def __init__(self, config: PEagleConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(config, embedding_and_head)
        self.config = config
        d = config.target.hidden
        self.mask = nn.Parameter(torch.zeros(d))
        """In place of the embedding of a token."""
        self.mask_states = nn.Parameter(torch.zeros(len(config.recorded_layers) * d))
        """In place of the target's hidden states."""

    @property
    def depth(self) -> int:
        """Tokens that are drafted in one pass."""
        return self.config.depth

    @property
    def slots(self) -> int:
        """Masks after a position."""
        return self.depth - 1

    def adapt_state_dict(self, smaller: Speculator) -> dict[str, torch.Tensor]:
        """As in EAGLE-3, whose weights have no masks; these stay as they are."""
        own = {} if isinstance(smaller, PEagle) else {"mask": self.mask.data, "mask_states": self.mask_states.data}
        return super().adapt_state_dict(smaller) | own

    def append_masks(
        self, token: Int[torch.Tensor, "*n t"], feature: Float[torch.Tensor, "*n t d"], count: int
    ) -> tuple[Float[torch.Tensor, "*n u d"], Float[torch.Tensor, "*n u d"]]:
        """Embeddings and features of tokens and, after them, of `count` masks."""
        embedded = self.embed(token)
        mask, masked = self.mask.to(embedded.dtype), self.fuse(self.mask_states.to(self.dtype)).to(feature.dtype)
        shape = (*token.shape[:-1], count, -1)
        return torch.cat((embedded, mask.expand(shape)), -2), torch.cat((feature, masked.expand(shape)), -2)

    def draft(
        self,
        token: Int[torch.Tensor, " t"],
        states: Float[torch.Tensor, "t kd"],
        rollouts: int,
        order: Int[torch.Tensor, " u"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "u d"]:
        """Outputs of the layers at tokens that follow the target's concatenated states, and at the masks of some
        rollouts, over a cache; `layout` is that of the two in this `order`.
        """
        feature = self.fuse(states.to(cache.k.device, self.dtype))
        embedded, feature = self.append_masks(token.to(self.device), feature, rollouts * self.slots)
        return self.run_layers(embedded[order], feature[order], layout, cache)

    def forward(  # type: ignore[override]
        self,
        token: Int[torch.Tensor, "b s"],
        features: Sequence[Float[torch.Tensor, "b s d"]],
        anchor: Int[torch.Tensor, "b a"],
        wanted: Sequence[torch.Tensor],
        subset: TokenSubset | None = None,
    ) -> tuple[Float[torch.Tensor, "_ w"], ...]:
        """Logits of every depth. `wanted[0]` [b, t] marks the positions `0 .. s-2` whose prediction of the token two
        later is needed; `wanted[i]` [b, a] the rollouts after the positions `anchor` whose mask `i` is. `subset`: score
        these tokens only.
        """
        length, masks = token.shape[1] - 1, self.slots
        feature = self.fuse(torch.cat(tuple(features), -1).to(self.dtype)[:, :-1])
        embedded, feature = self.append_masks(token[:, 1:], feature, anchor.shape[1] * masks)
        after = anchor[..., None] + torch.arange(1, self.depth, device=token.device)
        read = torch.arange(length, device=token.device).expand(len(token), -1)
        angles = self.rope_angles(torch.cat((read, after.flatten(1)), 1))
        out = self.head_input(
            self.layers_over(embedded, feature, angles, RolloutAttention(length, anchor, self.config.window_of))
        )
        rollouts = out[:, length:].unflatten(1, (anchor.shape[1], masks))
        states = [out[:, :length][wanted[0]], *(rollouts[:, :, i][mask] for i, mask in enumerate(wanted[1:]))]
        return tuple(self.compute_logits(state, subset) for state in states)
