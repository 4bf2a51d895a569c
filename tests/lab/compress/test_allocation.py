"""What blocks give up (OWL, ranks by loss) and the update of factors: against the published formula and enumeration."""

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
from foretell.lab.compress.refit import refit, refit_block
from foretell.lab.quantize.base import InputStatistics, Role, linears, matrices, output_error, set_matrix
from foretell.lab.quantize.calibration import model_rope_tables
from foretell.model.block.layer import DecoderBlock
from foretell.model.training.full_forward import forward_blocks
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


def test_the_update_is_least_squares_and_never_raises_the_error() -> None:
    for seed in range(5):
        random = generator(seed)
        x, w, factor = (torch.randn(*s, generator=random) for s in ((90, 40), (24, 40), (24, 8)))
        inner = torch.randn(8, 40, generator=random)
        shifted = x + 0.3 * torch.randn(90, 40, generator=random)
        wanted, read = x @ w.T, shifted @ inner.T
        new = refit(factor, read, wanted - read @ factor.T)
        before, after = ((wanted - read @ each.T).square().sum() for each in (factor, new))
        assert after < before
        torch.testing.assert_close(new.T, torch.linalg.lstsq(read, wanted).solution, rtol=1e-2, atol=1e-2)
        again = refit(new, read, wanted - read @ new.T)
        assert (wanted - read @ again.T).square().sum() <= after * (1 + 1e-6)


def test_the_update_of_inputs_that_are_the_sources_changes_nothing() -> None:
    """Whitening is the optimum for these, in both factors."""
    x, weight = torch.randn(400, 40, generator=generator()), torch.randn(24, 40, generator=generator(1))
    inputs = InputStatistics(x.T @ x / len(x), x.abs().mean(0))
    outer, inner = (each.float() for each in SVDLLM(0.5).factors(weight, inputs))
    read = x @ inner.T
    torch.testing.assert_close(refit(outer, read, x @ weight.T - read @ outer.T), outer, rtol=0, atol=1e-4)


def test_a_block_is_fitted_again_in_the_order_in_which_it_runs() -> None:
    """The outputs of every matrix, for the inputs that it has in the compressed block, come nearer the source's."""
    config = TINY
    ropes = model_rope_tables(config)
    source, plain, updated = (first_block() for _ in range(3))
    x = torch.randn(3, 30, config.hidden, generator=generator())
    streams = torch.cat((x, x + 0.2 * torch.randn(x.shape, generator=generator(1))))
    for block in (plain, updated):
        for role, linear in linears(block).items():
            second = torch.eye(linear.weight.shape[1])
            made = SVDLLM(1, given=3).replace(linear, InputStatistics(second, second.diagonal()), torch.float32)
            set_matrix(block, role, made)

    after = refit_block(config, ropes, 0, source, updated, streams, torch.float32)
    torch.testing.assert_close(after[:3], forward_blocks([source], config, ropes, streams[:3]))
    torch.testing.assert_close(after[3:], forward_blocks([updated], config, ropes, streams[3:]))
    seen = dict[tuple[int, Role], torch.Tensor]()
    for k, block in enumerate((source, updated)):
        for role, matrix in matrices(block).items():
            matrix.register_forward_pre_hook(lambda _, inputs, at=(k, role): seen.update({at: inputs[0]}))
        forward_blocks([block], config, ropes, streams.chunk(2)[k])
    for role, whole in linears(source).items():
        wanted = seen[0, role] @ whole.weight.T
        old, new = (matrices(block)[role].weight for block in (plain, updated))
        errors = [float((wanted - seen[1, role] @ w.T).square().sum()) for w in (old, new)]
        assert errors[1] < errors[0], role
