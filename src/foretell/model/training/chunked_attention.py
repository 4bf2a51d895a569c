"""Causal attention of whole texts, as training runs it: torch's kernel, or on processors, where its way back is slow, a
few queries at a time.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float

_STRIP = 128
"""Queries at once."""

Pair = tuple[torch.Tensor, torch.Tensor]


def causal_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b g s e"],
    v: Float[torch.Tensor, "b g s e"],
    scale: float,
    own: Sequence[Pair] = (),
) -> Float[torch.Tensor, "b h n e"]:
    """Attention of the last `n` of `s` positions over the positions up to them and their `own`, as `chunked_attention`,
    by the faster way here.
    """
    if own or q.shape[2] != k.shape[2] or not _has_fast_kernel(q.device):
        return chunked_attention(q, k, v, scale, own)
    # Repeated heads, because the kernels that need no table of all pairs of positions want as many keys as queries.
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _has_fast_kernel(device: torch.device) -> bool:
    return device.type != "cpu"


def chunked_attention(
    q: Float[torch.Tensor, "b h n e"],
    k: Float[torch.Tensor, "b g s e"],
    v: Float[torch.Tensor, "b g s e"],
    scale: float,
    own: Sequence[Pair] = (),
) -> Float[torch.Tensor, "b h n e"]:
    """What the last `n` of `s` positions make of the positions up to them, as products of matrices.

    `own`: further keys and values, `[b g n e]` each, of which every query sees those of its own position. Heads share
    keys in groups.
    """
    b, h, n, e = q.shape
    groups, absent = k.shape[1], k.shape[2] - n
    grouped, keys = (q * scale).view(b, groups, h // groups, n, e), k.transpose(-1, -2)
    later = torch.full((_STRIP, _STRIP), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    strips = []
    for begin in range(0, n, _STRIP):
        end = min(begin + _STRIP, n)
        seen, mine = absent + end, grouped[:, :, :, begin:end]
        score = (mine.flatten(2, 3) @ keys[..., :seen]).view(*mine.shape[:-1], seen)
        score[..., absent + begin :] += later[: end - begin, : end - begin]
        if own:
            beside = [(mine * key[:, :, None, begin:end]).sum(-1, keepdim=True) for key, _ in own]
            score = torch.cat((score, *beside), -1)
        weight = score.softmax(-1, dtype=v.dtype)
        out = (weight[..., :seen].flatten(2, 3) @ v[:, :, :seen]).view_as(mine)
        for i, (_, value) in enumerate(own):
            out = out + weight[..., seen + i, None] * value[:, :, None, begin:end]
        strips.append(out)
    return torch.cat(strips, 3).view(b, h, n, e)
