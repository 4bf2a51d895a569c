"""Storage types: what is packed is what gguf reads, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from foretell.lab.quantize.gguf_grids import GGUF_GRIDS
from foretell.lab.quantize.integer_grid import IntegerGrid
from foretell.lab.quantize.rtn import round_to_nearest

TYPES = sorted(GGUF_GRIDS)


def matrix(inputs: int = 512) -> torch.Tensor:
    """Random weights with outliers, a row of zeros, blocks of one number, and tiny and large ones."""
    weight = torch.randn(24, inputs, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[::3, ::17] *= 20
    weight[1] = 0
    weight[2, :256] = 0.3
    weight[3, :256] *= 1e-6
    weight[4] *= 1e5
    return weight


@pytest.mark.parametrize("name", TYPES)
def test_packed_blocks_are_read_as_the_numbers_of_the_grid(name: str) -> None:
    grid = GGUF_GRIDS[name]
    found = round_to_nearest(matrix(), grid)
    stored = grid.stored(found)
    assert stored.kind == name and stored.shape == (24, 512)
    read = dequantize(stored.data.numpy(), GGMLQuantizationType[name])
    np.testing.assert_array_equal(read, found.values().numpy())
    np.testing.assert_array_equal(grid.stored(found.rows(3, 9)).data, stored.data[3:9])


@pytest.mark.parametrize("name", [n for n in TYPES if not n.endswith("K")])
def test_rounding_is_as_good_as_that_of_gguf(name: str) -> None:
    weight, kind = matrix(), GGMLQuantizationType[name]
    theirs = dequantize(quantize(weight.numpy(), kind), kind)
    ours = round_to_nearest(weight, GGUF_GRIDS[name]).values().numpy()
    assert ((ours - weight.numpy()) ** 2).sum() <= 1.01 * ((theirs - weight.numpy()) ** 2).sum()


@pytest.mark.parametrize(("name", "like"), [("Q4_K", "Q4_1"), ("Q5_K", "Q5_1"), ("Q6_K", "Q5_0")])
def test_searched_scales_lose_less_than_those_of_small_blocks(name: str, like: str) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    errors = [float((round_to_nearest(weight, GGUF_GRIDS[n]).values() - weight).square().sum()) for n in (name, like)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_within_half_a_level(bits: int, symmetric: bool) -> None:
    weight, grid = matrix(), IntegerGrid(bits, 64, symmetric)
    found = round_to_nearest(weight, grid)
    assert int(found.level.min()) >= grid.low and int(found.level.max()) <= grid.high
    scale = found.parameters.scale.repeat_interleave(64, 1)[..., 0]
    # A level, as zero points and scales are rounded too.
    assert bool(((found.values() - weight).abs() <= 1.05 * scale).all())


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="Q4_K needs rows of whole blocks of 256, found 576 inputs"):
        round_to_nearest(torch.zeros(1, 576), GGUF_GRIDS["Q4_K"])
