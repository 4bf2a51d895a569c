"""The attention of a decoder layer: its interface, and what all its implementations compute."""

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.model.block.linear import widen
from foretell.model.block.rope import RopeAngles, apply_rope
from foretell.model.cache.state_store import LayerStates
from foretell.model.config.attention import QueryScaling

Queries: TypeAlias = Float[torch.Tensor, "*t h e"]
Keys: TypeAlias = Float[torch.Tensor, "*t g e"]
"""Keys or values, of the heads that several query heads share."""
Merged: TypeAlias = Float[torch.Tensor, "*t he"]
"""What all query heads give, one after the other."""
HeadScores: TypeAlias = Float[torch.Tensor, " h"] | None
"""A score per query head that joins the softmax and is dropped afterwards (gpt-oss, arXiv 2508.10925); None: none."""


class AttentionBackend(ABC):
    """The attention of a decoder layer: over a cache in decoding, over whole sequences in training."""

    rotates = False
    """Whether layers leave the rotation of queries and keys to it, where nothing comes between: `rotate_and_attend`."""

    @abstractmethod
    def attend(self, layer: int, q: Queries, k: Keys, v: Keys, extra: HeadScores = None) -> Merged:
        """Attention of the new queries of a layer over earlier keys and values and the new ones."""

    def attend_shared(self, layer: int, q: Queries, extra: HeadScores = None) -> Merged:
        """Attention of a layer that reads the keys and values of an earlier one.

        Raises:
            ValueError: it is not supported here.
        """
        raise ValueError("layers that share keys and values are not supported in this training")

    def rotate_and_attend(
        self,
        layer: int,
        q: Queries,
        k: Keys | None,
        v: Keys | None,
        angles: RopeAngles | None,
        extra: HeadScores = None,
    ) -> Merged:
        """Attention of queries and keys that are still to be rotated by these angles (None: they are not rotated);
        without keys and values, over those of an earlier layer.
        """
        q, k = (part if part is None or angles is None else apply_rope(part, angles) for part in (q, k))
        assert q is not None
        return self.attend_shared(layer, q, extra) if k is None or v is None else self.attend(layer, q, k, v, extra)

    def states(self, layer: int) -> LayerStates:
        """The recurrent states of a layer.

        Raises:
            ValueError: they are not supported here.
        """
        raise ValueError("models with recurrent states are not supported in training: only in decoding")


def query_factors(scaling: QueryScaling, position: Int[torch.Tensor, "*t"]) -> Float[torch.Tensor, "*t"]:
    """The factor on the queries at these positions."""
    steps = torch.div(position + scaling.offset, scaling.interval, rounding_mode="floor")
    return 1 + scaling.factor * torch.log1p(steps.float())


def scale_queries(
    q: Float[torch.Tensor, "*t h e"], position: Int[torch.Tensor, "*t"], scaling: QueryScaling | None
) -> Float[torch.Tensor, "*t h e"]:
    """Queries times the factors of their positions; None: as they are."""
    return q if scaling is None else q * query_factors(scaling, position)[..., None, None].to(q.dtype)


def masked_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b h s e"],
    v: Float[torch.Tensor, "b h s e"],
    mask: Bool[torch.Tensor, "*any n s"],
    scale: float,
    softcap: float,
    extra: Float[torch.Tensor, "h n"] | None = None,
) -> Float[torch.Tensor, "b h n e"]:
    """Softmax attention over the keys that the mask allows; `softcap` bounds the scores (0: no bound), `extra` are
    further scores in the denominator of the softmax.
    """
    if not softcap and extra is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    score = widen(q @ k.transpose(-1, -2)) * scale
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(~mask, float("-inf"))
    if extra is None:
        weight = score.softmax(-1)
    else:
        column = extra.to(score.dtype)[:, :, None].expand(len(q), -1, -1, -1)
        weight = torch.cat((score, column), -1).softmax(-1)[..., :-1]
    out: torch.Tensor = weight.to(v.dtype) @ v
    return out
