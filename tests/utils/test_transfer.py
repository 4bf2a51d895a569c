"""Memory of tensors."""

from pathlib import Path

import pytest
import torch

from foretell.utils.transfer import lazy_zeros, movable_view


def _resident_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux says what a process has in memory")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def test_zeros_take_memory_where_they_are_written() -> None:
    before = _resident_bytes()
    x = lazy_zeros((4, 2**28), torch.empty(0, dtype=torch.bfloat16))
    x[:, :1000] = 1
    assert _resident_bytes() - before < 2**24
    assert x.dtype == torch.bfloat16 and x.sum().item() == 4000


@pytest.mark.parametrize("shape", [(3, 0, 5), (2, 3), (1,)])
def test_zeros_have_any_shape(shape: tuple[int, ...]) -> None:
    x = lazy_zeros(shape, torch.empty(0))
    assert x.shape == shape and not x.any() and x.data_ptr() % 64 == 0


def test_a_view_moves_numbers_without_a_change() -> None:
    x = torch.randn(4, 3).bfloat16()
    y = torch.empty_like(x)
    movable_view(y)[[2, 0, 1, 3]] = movable_view(x)
    assert torch.equal(y[[2, 0, 1, 3]], x)
