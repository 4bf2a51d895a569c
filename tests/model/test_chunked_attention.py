"""Attention in strips is that over the whole table of scores, there and back."""

import pytest
import torch

from foretell.model.training import chunked_attention as strips
from foretell.model.training.chunked_attention import KeyValue, causal_attention, chunked_attention

SCALE = 0.25


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: list[KeyValue]) -> torch.Tensor:
    """The same with one table per head and float64 throughout."""
    n, s = q.shape[2], k.shape[2]
    q, k, v, *more = (x.double() for x in (q, k, v, *(part for pair in own for part in pair)))
    k, v, *more = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, *more))
    hidden = torch.arange(s) > torch.arange(s - n, s)[:, None]
    score = (q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    diagonal = [torch.einsum("bhne,bhne->bhn", q, key)[..., None] for key in more[::2]]
    weight = (torch.cat([score, *diagonal], -1) * SCALE).softmax(-1)
    out = weight[..., :s] @ v
    for i, value in enumerate(more[1::2]):
        out = out + weight[..., s + i, None] * value
    return out


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("absent", [0, 6])
def test_strips_are_the_whole(
    dtype: torch.dtype, near: float, steps: int, absent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strips, "_STRIP", 8)
    torch.manual_seed(0)
    n = 21
    shapes = [(2, 6, n, 16), *[(2, 3, n + absent, 16)] * 2, *[(2, 3, n, 16)] * (2 * steps)]
    parts = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    q, k, v, *more = parts
    own = list(zip(more[::2], more[1::2], strict=True))
    expected, found = whole(q, k, v, own), chunked_attention(q, k, v, SCALE, own)
    torch.testing.assert_close(found.double(), expected, atol=near, rtol=0)
    slope = torch.randn(expected.shape).to(dtype)
    slopes = [torch.autograd.grad(out, parts, slope.to(out.dtype)) for out in (expected, found)]
    for mine, right in zip(slopes[1], slopes[0], strict=True):
        torch.testing.assert_close(mine, right, atol=near * 2, rtol=0)


@pytest.mark.parametrize("absent", [0, 6])
@pytest.mark.parametrize("steps", [0, 2])
def test_torchs_kernel_gives_what_strips_give(steps: int, absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "_has_fast_kernel", lambda device: True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h, n in ((6, 9), (3, 9 + absent), (3, 9 + absent)))
    own = [(k[:, :, -9:] + i, v[:, :, -9:] - i) for i in range(steps)]
    torch.testing.assert_close(causal_attention(q, k, v, SCALE, own), chunked_attention(q, k, v, SCALE, own))
