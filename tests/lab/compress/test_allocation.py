"""What blocks give up (OWL, ranks by loss): against the published formula and enumeration."""

from itertools import product

import pytest
import torch

from foretell.lab.compress.allocation import (
    Matrix,
    dropped_energy,
    outlier_share,
    ranks_by_loss,
    shares_by_outliers,
    stored_numbers,
)
from foretell.lab.compress.low_rank import SVDLLM
from foretell.lab.quantize.base import InputStatistics, Role, linears, output_error
from foretell.model.block.layer import DecoderBlock
from foretell.testing import TINY, tiny_decoder

SHAPES: dict[Role, tuple[int, int]] = {"qkv": (12, 6), "down": (5, 9)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moment(seed: int, inputs: int) -> torch.Tensor:
    x = torch.randn(200, inputs, generator=generator(seed)) * torch.linspace(0.1, 3, inputs)
    return x.T @ x / len(x)


def first_block() -> DecoderBlock:
    block = tiny_decoder(TINY, dtype=torch.float32).blocks[0]
    assert isinstance(block, DecoderBlock)
    return block


@pytest.mark.parametrize("share", [0.05, 0.5, 0.7, 0.97])
def test_owl_shares_follow_the_published_formula_and_keep_their_mean(share: float) -> None:
    outliers = (torch.rand(30, generator=generator()) * 0.02).tolist()
    shares = torch.tensor(shares_by_outliers(outliers, share), dtype=torch.float64)
    assert float(shares.mean()) == pytest.approx(share, abs=1e-12)
    assert shares.min() >= 0 and shares.max() <= 1
    assert shares.argsort().tolist() == torch.tensor(outliers).argsort(descending=True).tolist()
    if 0.16 < share < 0.84:
        ratio = torch.tensor(outliers, dtype=torch.float64)
        ratio = (ratio - ratio.min()) * (1 / (ratio.max() - ratio.min()) * 0.08 * 2)
        kept = ratio - ratio.mean() + (1 - share)
        torch.testing.assert_close(1 - kept, shares)


def test_owl_shares_of_equal_blocks_are_equal() -> None:
    assert shares_by_outliers([0.01] * 4, 0.6) == [0.6] * 4


def test_outliers_are_counted_over_the_whole_block() -> None:
    block = first_block()
    inputs, scores = dict[Role, InputStatistics](), list[float]()
    for k, (role, linear) in enumerate(linears(block).items()):
        linear.weight.data[0, 0] = 40
        second = moment(k, linear.weight.shape[1])
        inputs[role] = InputStatistics(second, second.diagonal())
        scores += [abs(float(w)) * float(second[j, j]) ** 0.5 for row in linear.weight for j, w in enumerate(row)]
    limit = 5 * sum(scores) / len(scores)
    counted = sum(score > limit for score in scores)
    assert counted and outlier_share(block, inputs) == pytest.approx(counted / len(scores), rel=1e-5)


@pytest.mark.parametrize("shape", [(24, 160), (160, 24), (32, 32)], ids=str)
def test_the_energy_that_is_dropped_is_the_error_of_the_truncation(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=generator())
    inputs = InputStatistics(moment(1, shape[1]), torch.ones(shape[1]))
    lost = dropped_energy(weight, inputs.second_moment)
    assert lost[0] == 0 and lost[-1] == 1 and len(lost) == min(shape) + 1
    for rank in (1, 7, 20):
        error = output_error(SVDLLM(1, given=rank).compress(weight, inputs) - weight, inputs)
        assert error / output_error(weight, inputs) == pytest.approx(float(lost[min(shape) - rank]), rel=1e-3)


def test_inputs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="calibration inputs of a matrix are not finite"):
        dropped_energy(torch.ones(4, 3), torch.full((3, 3), torch.inf))


def lost_of(seed: int, blocks: int) -> dict[Matrix, torch.Tensor]:
    return {
        (i, role): dropped_energy(torch.randn(shape, generator=generator(100 * seed + i)), moment(i, shape[1]))
        for i in range(blocks)
        for role, shape in SHAPES.items()
    }


@pytest.mark.parametrize("seed", range(6))
def test_ranks_by_loss_lose_least_of_all_ranks_with_their_numbers(seed: int) -> None:
    lost, compressor = lost_of(seed, 2), SVDLLM(0.5)
    ranks = ranks_by_loss(lost, SHAPES, compressor)
    sizes = {at: SHAPES[at[1]] for at in lost}
    forms = {at: [0, *(r for r in range(1, min(o, n)) if r * (o + n) < o * n)] for at, (o, n) in sizes.items()}

    def numbers(chosen: dict[Matrix, int]) -> int:
        return sum(stored_numbers(rank, *SHAPES[role]) for (_, role), rank in chosen.items())

    def loss(chosen: dict[Matrix, int]) -> float:
        return sum(float(lost[at][min(SHAPES[at[1]]) - r]) if r else 0.0 for at, r in chosen.items())

    every = [dict(zip(lost, combination, strict=True)) for combination in product(*forms.values())]
    used, budget = numbers(ranks), numbers({at: compressor.stored_rank(*SHAPES[at[1]]) for at in lost})
    largest_step = max(12 * 6, 5 * 9)
    assert budget - largest_step < used <= budget
    best = min(loss(chosen) for chosen in every if numbers(chosen) <= used)
    assert loss(ranks) <= best * 1.25 + 1e-9
    exact = ranks_by_loss(lost, SHAPES, SVDLLM(1.0))
    assert set(exact.values()) == {0}, "a budget of all numbers leaves all matrices as they are"
