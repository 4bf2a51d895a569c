"""Chunked attention equals attention over the whole score matrix, forward and backward."""

import pytest
import torch

from foretell.model.training import chunked_attention as module
from foretell.model.training.chunked_attention import KeyValue, causal_attention, chunked_attention

SCALE = 0.25


def unchunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    diagonal: list[KeyValue],
    window: int = 0,
    extra: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with one score matrix per head, in float64."""
    n, s = q.shape[2], k.shape[2]
    q, k, v, *more = (x.double() for x in (q, k, v, *(part for pair in diagonal for part in pair)))
    k, v, *more = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, *more))
    row = torch.arange(s - n, s)[:, None]
    masked = torch.arange(s) > row
    if window:
        masked = masked | (torch.arange(s) <= row + len(diagonal) - window)
    score = (q @ k.transpose(-1, -2)).masked_fill(masked, float("-inf"))
    own_score = [torch.einsum("bhne,bhne->bhn", q, key)[..., None] for key in more[::2]]
    for i in range(len(diagonal) - window if window else 0):
        own_score[i] = torch.full_like(own_score[i], float("-inf"))
    sinks = [] if extra is None else [extra.double()[None, :, None, None].expand(*q.shape[:3], 1) / SCALE]
    weight = (torch.cat([score, *own_score, *sinks], -1) * SCALE).softmax(-1)
    out = weight[..., :s] @ v
    for i, value in enumerate(more[1::2]):
        out = out + weight[..., s + i, None] * value
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("offset", [0, 6])
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (1, False), (2, True), (5, False), (11, True), (99, True)])
def test_chunked_attention_equals_unchunked_attention(
    dtype: torch.dtype,
    tolerance: float,
    steps: int,
    offset: int,
    window: int,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK", 8)
    torch.manual_seed(0)
    n = 21
    shapes = [(2, 6, n, 16), *[(2, 3, n + offset, 16)] * 2, *[(2, 3, n, 16)] * (2 * steps)]
    parts = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    q, k, v, *more = parts
    extra = torch.randn(6, dtype=torch.float64).to(dtype).requires_grad_() if sinks else None
    parts = parts if extra is None else [*parts, extra]
    diagonal = list(zip(more[::2], more[1::2], strict=True))
    expected = unchunked(q, k, v, diagonal, window, extra)
    found = chunked_attention(q, k, v, SCALE, diagonal, window, extra)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)
    gradient = torch.randn(expected.shape).to(dtype)
    gradients = [
        torch.autograd.grad(out, parts, gradient.to(out.dtype), allow_unused=True, materialize_grads=True)
        for out in (expected, found)
    ]
    for mine, right in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, right, atol=tolerance * 2, rtol=0)


@pytest.mark.parametrize("offset", [0, 6])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_fast_kernel_equals_chunked_attention(steps: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_fast_kernel", lambda device: True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.float64) for h, n in ((6, 9), (3, 9 + offset), (3, 9 + offset)))
    diagonal = [(k[:, :, -9:] + i, v[:, :, -9:] - i) for i in range(steps)]
    torch.testing.assert_close(causal_attention(q, k, v, SCALE, diagonal), chunked_attention(q, k, v, SCALE, diagonal))
