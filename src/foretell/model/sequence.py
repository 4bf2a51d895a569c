"""Whole sequences through decoder blocks, without a cache and in a way that can be differentiated: what training runs."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import nn

from foretell.model.config import ModelConfig
from foretell.model.decoder import Block, Decoder
from foretell.model.linear import widen
from foretell.model.rope import Tables, rotate
from foretell.model.strips import causal_attention


def run_blocks(
    decoder: Decoder, x: Float[torch.Tensor, "b s d"], first: int = 0, last: int | None = None
) -> Float[torch.Tensor, "b s d"]:
    """Blocks `first .. last-1` (None: to the end) of a decoder over texts from their first token on; padding stands at the end."""
    blocks = list(decoder.blocks)[first:last]
    return through(blocks, decoder.config, (decoder.rope, decoder.local_rope), x, first)


def through(
    blocks: Iterable[nn.Module],
    config: ModelConfig,
    ropes: tuple[Tables, Tables],
    x: Float[torch.Tensor, "b s d"],
    first: int = 0,
) -> Float[torch.Tensor, "b s d"]:
    """Blocks of a configuration, the first of which is its `first`; `ropes` are the tables of full and of windowed layers."""
    for i, block in enumerate(blocks, first):
        assert isinstance(block, Block)
        window = config.window_of(i)
        part = _attention(block, config, ropes[window > 0], window, block.attention_norm(x))
        x = x + (part if block.post_attention_norm is None else block.post_attention_norm(part))
        inner = block.mlp_norm(x)
        part = block.mlp(inner.flatten(0, 1)).view_as(x)
        x = x + (part if block.post_mlp_norm is None else block.post_mlp_norm(part))
    return x


def _attention(block: Block, config: ModelConfig, rope: Tables, window: int, x: torch.Tensor) -> torch.Tensor:
    b, s, _ = x.shape
    c = config
    q, k, v = (part.flatten(0, 1) for part in split_heads(block, config, x))
    q = q if block.q_norm is None else block.q_norm(q)
    k = k if block.k_norm is None else block.k_norm(k)
    position = torch.arange(s, device=x.device).repeat(b)
    q, k = rotate(q, position, rope), rotate(k, position, rope)
    q, k, v = (part.reshape(b, s, -1, c.head_dim).transpose(1, 2) for part in (q, k, v))
    if c.attention_softcap or 0 < window < s:
        k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (k, v))
        out = masked_attention(q, k, v, _within(s, window, x.device), c.scale, c.attention_softcap)
    else:
        out = causal_attention(q, k, v, c.scale)
    done: torch.Tensor = block.output(out.transpose(1, 2).reshape(b, s, -1))
    return done


def _within(s: int, window: int, device: torch.device) -> Bool[torch.Tensor, "s s"]:
    """Which of `s` positions each sees: those up to it, within a sliding window (0: none)."""
    age = torch.arange(s, device=device)[:, None] - torch.arange(s, device=device)
    return (age >= 0) & (age < (window or s))


def split_heads(block: Block, config: ModelConfig, x: Float[torch.Tensor, "b s d"]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of what the block's norm gave, `[b s h e]` each."""
    heads = block.qkv(x).view(*x.shape[:2], config.heads + 2 * config.kv_heads, config.head_dim)
    split: tuple[torch.Tensor, ...] = heads.split((config.heads, config.kv_heads, config.kv_heads), 2)
    return split


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
