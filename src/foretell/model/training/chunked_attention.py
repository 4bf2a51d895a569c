"""Causal attention over whole sequences for training: torch's kernel, or on the CPU, where its backward pass is slow,
attention over one chunk of queries at a time.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float

_CHUNK = 128
"""Queries per chunk."""

KeyValue = tuple[torch.Tensor, torch.Tensor]


def causal_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b g s e"],
    v: Float[torch.Tensor, "b g s e"],
    scale: float,
    diagonal: Sequence[KeyValue] = (),
) -> Float[torch.Tensor, "b h n e"]:
    """Causal attention of the last `n` of `s` positions, as `chunked_attention`, by the faster way on this device."""
    if diagonal or q.shape[2] != k.shape[2] or not _has_fast_kernel(q.device):
        return chunked_attention(q, k, v, scale, diagonal)
    # Repeated heads: torch's kernels without a score matrix need as many key heads as query heads.
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _has_fast_kernel(device: torch.device) -> bool:
    return device.type != "cpu"


def chunked_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b g s e"],
    v: Float[torch.Tensor, "b g s e"],
    scale: float,
    diagonal: Sequence[KeyValue] = (),
) -> Float[torch.Tensor, "b h n e"]:
    """Causal grouped-query attention of the last `n` of `s` positions, as matrix products over chunks of queries.

    `diagonal`: further keys and values, `[b g n e]` each, of which every query attends to those of its own position
    only (EAGLE-3's training-time test, arXiv 2503.01840).
    """
    b, h, n, e = q.shape
    kv_heads, offset = k.shape[1], k.shape[2] - n
    grouped, keys = (q * scale).view(b, kv_heads, h // kv_heads, n, e), k.transpose(-1, -2)
    causal = torch.full((_CHUNK, _CHUNK), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    chunks = []
    for begin in range(0, n, _CHUNK):
        end = min(begin + _CHUNK, n)
        visible, queries = offset + end, grouped[:, :, :, begin:end]
        score = (queries.flatten(2, 3) @ keys[..., :visible]).view(*queries.shape[:-1], visible)
        score[..., offset + begin :] += causal[: end - begin, : end - begin]
        if diagonal:
            more = [(queries * key[:, :, None, begin:end]).sum(-1, keepdim=True) for key, _ in diagonal]
            score = torch.cat((score, *more), -1)
        weight = score.softmax(-1, dtype=v.dtype)
        out = (weight[..., :visible].flatten(2, 3) @ v[:, :, :visible]).view_as(queries)
        for i, (_, value) in enumerate(diagonal):
            out = out + weight[..., visible + i, None] * value[:, :, None, begin:end]
        chunks.append(out)
    return torch.cat(chunks, 3).view(b, h, n, e)
