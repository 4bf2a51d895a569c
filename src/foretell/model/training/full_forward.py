"""Whole sequences through decoder blocks, without a cache and in a way that can be differentiated: what training
runs.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import nn

from foretell.model.attention import Sight
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder, DecoderBlock
from foretell.model.linear import widen
from foretell.model.rope import Tables, rotation
from foretell.model.training.chunked_attention import causal_attention


def full_forward(
    decoder: Decoder, x: Float[torch.Tensor, "b s d"], first: int = 0, last: int | None = None
) -> Float[torch.Tensor, "b s d"]:
    """Blocks `first .. last-1` (None: to the end) of a decoder over texts from their first token on; padding stands at
    the end.
    """
    blocks = list(decoder.blocks)[first:last]
    return through(blocks, decoder.config, (decoder.rope, decoder.local_rope), x, first)


def through(
    blocks: Iterable[nn.Module],
    config: ModelConfig,
    ropes: tuple[Tables, Tables],
    x: Float[torch.Tensor, "b s d"],
    first: int = 0,
) -> Float[torch.Tensor, "b s d"]:
    """Blocks of a configuration, the first of which is its `first`; `ropes` are the tables of full and of windowed
    layers.
    """
    position, sight = torch.arange(x.shape[1], device=x.device), Causal(config)
    angles = [rotation(rope, position) for rope in ropes]
    for i, block in enumerate(blocks, first):
        assert isinstance(block, DecoderBlock)
        x = block(x, config, angles[config.window_of(i) > 0], i, sight)
    return x


class Causal(Sight):
    """Causal attention of whole texts `[b, s]` over themselves, within the sliding windows of a configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def attend(
        self,
        layer: int,
        q: Float[torch.Tensor, "b s h e"],
        k: Float[torch.Tensor, "b s g e"],
        v: Float[torch.Tensor, "b s g e"],
    ) -> Float[torch.Tensor, "b s he"]:
        """Every position sees those up to it."""
        c, window, s = self._config, self._config.window_of(layer), q.shape[1]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if c.attention_softcap or 0 < window < s:
            k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (k, v))
            out = masked_attention(q, k, v, _within(s, window, q.device), c.scale, c.attention_softcap)
        else:
            out = causal_attention(q, k, v, c.scale)
        joined: torch.Tensor = out.transpose(1, 2).flatten(2)
        return joined


def _within(s: int, window: int, device: torch.device) -> Bool[torch.Tensor, "s s"]:
    """Which of `s` positions each sees: those up to it, within a sliding window (0: none)."""
    age = torch.arange(s, device=device)[:, None] - torch.arange(s, device=device)
    return (age >= 0) & (age < (window or s))


def masked_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b h s e"],
    v: Float[torch.Tensor, "b h s e"],
    seen: Bool[torch.Tensor, "*any n s"],
    scale: float,
    softcap: float,
) -> Float[torch.Tensor, "b h n e"]:
    """Softmax attention over the keys that are seen, scores bounded by a soft cap (0: not)."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    score = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    out: torch.Tensor = widen(score.masked_fill(~seen, float("-inf"))).softmax(-1).to(v.dtype) @ v
    return out
