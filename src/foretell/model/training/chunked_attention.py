"""Causal attention over whole sequences for training: torch's kernel, or on the CPU, where its backward pass is slow,
attention over one chunk of queries at a time.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float

_CPU_CHUNK, _GPU_CHUNK = 128, 512
"""Queries per chunk. A GPU needs larger products to be busy."""

KeyValue = tuple[torch.Tensor, torch.Tensor]


def causal_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b g s e"],
    v: Float[torch.Tensor, "b g s e"],
    scale: float,
    diagonal: Sequence[KeyValue] = (),
    window: int = 0,
    extra: Float[torch.Tensor, " h"] | None = None,
) -> Float[torch.Tensor, "b h n e"]:
    """Causal attention of the last `n` of `s` positions, as `chunked_attention`, by the faster way on this device."""
    masked = diagonal or window or extra is not None or q.shape[2] != k.shape[2]
    if masked or not _has_fast_kernel(q.device):
        return chunked_attention(q, k, v, scale, diagonal, window, extra)
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
    window: int = 0,
    extra: Float[torch.Tensor, " h"] | None = None,
) -> Float[torch.Tensor, "b h n e"]:
    """Causal grouped-query attention of the last `n` of `s` positions, as matrix products over chunks of queries.

    `diagonal`: further keys and values, `[b g n e]` each, of which every query attends to those of its own position
    only (EAGLE-3's training-time test, arXiv 2503.01840). They stand one after the other at the positions after it, and
    the query at the last of them.

    `window`: keys that a query sees, itself included, counted back from its position; 0: all. `extra`: a score per
    query head that joins the softmax.
    """
    b, h, n, e = q.shape
    kv_heads, offset, later = k.shape[1], k.shape[2] - n, len(diagonal)
    diagonal = diagonal[-window:]
    grouped, keys = (q * scale).view(b, kv_heads, h // kv_heads, n, e), k.transpose(-1, -2)
    size = _CPU_CHUNK if q.device.type == "cpu" else _GPU_CHUNK
    causal = torch.full((size, size), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    chunks = []
    for begin in range(0, n, size):
        end = min(begin + size, n)
        visible, queries = offset + end, grouped[:, :, :, begin:end]
        first = min(max(0, offset + begin + later + 1 - window), offset + begin) if window else 0
        seen = visible - first
        score = (queries.flatten(2, 3) @ keys[..., first:visible]).view(*queries.shape[:-1], seen)
        score[..., offset + begin - first :] += causal[: end - begin, : end - begin]
        if window:
            position = torch.arange(offset + begin, visible, device=q.device)[:, None] + later
            outside = position - torch.arange(first, visible, device=q.device) >= window
            score = score.masked_fill(outside, float("-inf"))
        more = [(queries * key[:, :, None, begin:end]).sum(-1, keepdim=True) for key, _ in diagonal]
        if extra is not None:
            more.append(extra.to(score.dtype).view(kv_heads, -1, 1, 1).expand(*score.shape[:-1], 1))
        score = torch.cat((score, *more), -1) if more else score
        weight = score.softmax(-1, dtype=v.dtype)
        out = (weight[..., :seen].flatten(2, 3) @ v[:, :, first:visible]).view_as(queries)
        for i, (_, value) in enumerate(diagonal):
            out = out + weight[..., seen + i, None] * value[:, :, None, begin:end]
        chunks.append(out)
    return torch.cat(chunks, 3).view(b, h, n, e)
