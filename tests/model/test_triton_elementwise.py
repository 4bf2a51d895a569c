"""The kernels of norms and activations, on a GPU or in Triton's interpreter: torch is the oracle."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from foretell.model.triton import elementwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")
"""Triton's interpreter does not round to bfloat16 as GPUs do."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 80), (4, 4097), (1, 16384)], ids=str)
def test_norms_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * random(*shape), random(shape[-1])
    launch, out = elementwise.rms_norm(x, weight, 1e-5, dtype)
    launch.run()
    exact = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6 + torch.finfo(dtype).eps / 2 * (1 + 1e-3), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 128), (2, 5, 320), (4, 4102)], ids=str)
def test_gated_activations_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Both factors and the product are rounded where torch rounds them; the exponential may differ in its last bit."""
    projected = 3 * random(*shape, dtype=dtype)
    launch, out = elementwise.gated_silu(projected)
    launch.run()
    gate, up = projected.chunk(2, -1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    if dtype != torch.float32:
        assert (out != expected).float().mean() < 0.01
