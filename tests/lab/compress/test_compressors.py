"""Compression methods: what their papers promise, on random matrices."""

import pytest
import torch

from foretell.lab.compress import LOW_RANK, PRUNING
from foretell.lab.compress.low_rank import ASVD, SVD, SVDLLM, project
from foretell.lab.compress.pruning import Magnitude, Wanda
from foretell.lab.compress.sparsegpt import GROUP, SparseGPT
from foretell.lab.compress.sparsity import Pattern, Sparsity
from foretell.lab.quantize.base import InputStatistics, output_error
from foretell.lab.quantize.gptq import GPTQ
from foretell.lab.quantize.integer_grid import IntegerGrid

TWO_OF_FOUR = Sparsity.of(Pattern(2, 4))


def random_weight(seed: int = 0, outputs: int = 24, inputs: int = 160) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def statistics(seed: int = 1, inputs: int = 160, tokens: int = 600) -> InputStatistics:
    """Of correlated inputs whose sizes differ."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator) * 0.1 + torch.eye(inputs)
    sizes = 0.1 + 3 * torch.rand(inputs, generator=generator) ** 4
    x = torch.randn(tokens, inputs, generator=generator) @ mixed * sizes
    return InputStatistics(x.T @ x / tokens, x.abs().mean(0))


def alike(inputs: int = 160) -> InputStatistics:
    """Of inputs that are all equally large and independent."""
    return InputStatistics(torch.eye(inputs) * 3, torch.ones(inputs) * 2)


@pytest.mark.parametrize("method", PRUNING)
def test_no_sparsity_changes_nothing_and_full_sparsity_leaves_nothing(method: str) -> None:
    weight = random_weight()
    assert torch.equal(PRUNING[method](Sparsity(0)).compress(weight, statistics()), weight)
    assert not PRUNING[method](Sparsity(1)).compress(weight, statistics()).any()


@pytest.mark.parametrize("method", PRUNING)
@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(4, 8), Pattern(1, 4), Pattern(3, 5)])
def test_a_pattern_keeps_exactly_so_many_of_every_group(method: str, pattern: Pattern) -> None:
    pruned = PRUNING[method](Sparsity.of(pattern)).compress(random_weight(), statistics())
    kept = (pruned.unflatten(1, (-1, pattern.group)) != 0).sum(-1)
    assert torch.equal(kept, torch.full_like(kept, pattern.kept))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_every_output_loses_the_same_share(share: float) -> None:
    for method in (Magnitude, Wanda):
        kept = (method(Sparsity(share)).compress(random_weight(), statistics()) != 0).sum(1)
        assert torch.equal(kept, torch.full_like(kept, 160 - round(share * 160)))
    zeros = SparseGPT(Sparsity(share)).compress(random_weight(), statistics()) == 0
    assert [int(part.sum()) for part in zeros.split(128, 1)] == [round(share * 24 * width) for width in (128, 32)]


@pytest.mark.parametrize("sparsity", [Sparsity(0.5), TWO_OF_FOUR], ids=str)
def test_wanda_is_magnitude_for_equal_inputs_and_does_not_depend_on_their_scale(sparsity: Sparsity) -> None:
    weight, inputs = random_weight(), statistics()
    by_size = Magnitude(sparsity).compress(weight, None)
    assert torch.equal(Wanda(sparsity).compress(weight, alike()), by_size)
    found = Wanda(sparsity).compress(weight, inputs)
    assert not torch.equal(found, by_size)
    scaled = InputStatistics(inputs.second_moment * 64, inputs.mean_magnitude * 8)
    assert torch.equal(Wanda(sparsity).compress(weight, scaled), found)


def test_wanda_prunes_a_permuted_matrix_alike() -> None:
    weight, inputs = random_weight(), statistics()
    order = torch.randperm(160, generator=torch.Generator().manual_seed(2))
    permuted = InputStatistics(inputs.second_moment[order][:, order], inputs.mean_magnitude[order])
    found = Wanda(Sparsity(0.5)).compress(weight[:, order], permuted)
    assert torch.equal(found, Wanda(Sparsity(0.5)).compress(weight, inputs)[:, order])


def test_of_equal_scores_the_first_goes() -> None:
    weight = torch.tensor([[1.0, -1, 1, 1, 2, 2, 2, 2]])
    assert Magnitude(TWO_OF_FOUR).compress(weight, None).tolist() == [[0, 0, 1, 1, 0, 0, 2, 2]]
    assert Magnitude(Sparsity(0.25)).compress(weight, None).tolist() == [[0, 0, 1, 1, 2, 2, 2, 2]]


@pytest.mark.parametrize("sparsity", [Sparsity(0.5), TWO_OF_FOUR], ids=str)
def test_sparsegpt_loses_less_than_wanda_and_wanda_less_than_magnitude(sparsity: Sparsity) -> None:
    lost = dict.fromkeys(PRUNING, 0.0)
    for seed in range(8):
        weight, inputs = random_weight(seed), statistics(seed + 100)
        for method in PRUNING:
            lost[method] += output_error(PRUNING[method](sparsity).compress(weight, inputs) - weight, inputs)
    assert 1.2 * lost["sparsegpt"] < lost["wanda"] < 0.9 * lost["magnitude"]


@pytest.mark.parametrize("sparsity", [Sparsity(0.5), TWO_OF_FOUR], ids=str)
def test_sparsegpt_of_unrelated_inputs_leaves_the_other_weights(sparsity: Sparsity) -> None:
    weight = random_weight()
    found = SparseGPT(sparsity).compress(weight, alike())
    torch.testing.assert_close(found, torch.where(found == 0, 0, weight))


@pytest.mark.parametrize("bits", [3, 4])
def test_sparsegpt_that_prunes_nothing_and_rounds_is_gptq(bits: int) -> None:
    weight, inputs = random_weight(), statistics()
    grid = IntegerGrid(bits, GROUP, symmetric=True)
    expected = GPTQ(act_order=False).quantize("down", weight, grid, inputs).values()
    found = SparseGPT(Sparsity(0), bits).compress(weight, inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert output_error(found - weight, inputs) > 0


@pytest.mark.parametrize("sparsity", [Sparsity(0.5), TWO_OF_FOUR], ids=str)
def test_pruning_and_rounding_in_one_pass_loses_less_than_one_after_the_other(sparsity: Sparsity) -> None:
    together = apart = 0.0
    for seed in range(4):
        weight, inputs = random_weight(seed), statistics(seed + 100)
        found = SparseGPT(sparsity, 3).compress(weight, inputs)
        assert float((found == 0).float().mean()) >= sparsity.share
        assert all(len(group.unique()) <= 8 for row in found[:4] for group in row.split(GROUP))
        pruned, grid = SparseGPT(sparsity).compress(weight, inputs), IntegerGrid(3, GROUP, symmetric=True)
        groups = grid.split(pruned)
        parameters = grid.store(*grid.fit(groups))
        rounded = grid.values(grid.levels(groups, parameters), parameters).flatten(1)
        together += output_error(found - weight, inputs)
        apart += output_error(rounded - weight, inputs)
    assert together < 0.95 * apart


def test_rounding_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="no whole groups of 32, as --bits needs"):
        SparseGPT(Sparsity(0.5), 4).check(24, 40, "down")
    with pytest.raises(ValueError, match="a pattern whose group divides 32, found --pattern 2:5"):
        SparseGPT(Sparsity.of(Pattern(2, 5)), 4).check(24, 160, "down")


def test_sparsegpt_takes_unused_inputs_and_refuses_infinite_ones() -> None:
    moment = statistics().second_moment.clone()
    moment[5], moment[:, 5] = 0, 0
    assert not SparseGPT(Sparsity(0.5)).compress(random_weight(), InputStatistics(moment, moment[0]))[:, 5].any()
    with pytest.raises(ValueError, match="not finite"):
        SparseGPT(Sparsity(0.5)).compress(random_weight(), InputStatistics(moment * torch.inf, moment[0]))


@pytest.mark.parametrize("shape", [(24, 160), (160, 24), (32, 32)], ids=str)
@pytest.mark.parametrize("method", LOW_RANK)
def test_full_rank_is_exact(method: str, shape: tuple[int, int]) -> None:
    weight = random_weight(0, *shape)
    torch.testing.assert_close(LOW_RANK[method](1.0).compress(weight, statistics(inputs=shape[1])), weight)


@pytest.mark.parametrize("shape", [(24, 160), (160, 24)], ids=str)
def test_svd_is_the_nearest_matrix_of_its_rank(shape: tuple[int, int]) -> None:
    weight = random_weight(0, *shape)
    u, sigma, v = torch.linalg.svd(weight.double(), full_matrices=False)
    torch.testing.assert_close(SVD(0.5).compress(weight, None), ((u * sigma)[:, :12] @ v[:12]).float())
    for method in (ASVD, SVDLLM):
        torch.testing.assert_close(method(0.5).compress(weight, alike(shape[1])), SVD(0.5).compress(weight, None))


@pytest.mark.parametrize("shape", [(24, 160), (160, 24)], ids=str)
def test_whitening_loses_the_singular_values_that_it_drops(shape: tuple[int, int]) -> None:
    weight, inputs = random_weight(0, *shape), statistics(inputs=shape[1])
    root = torch.linalg.cholesky(inputs.second_moment.double())
    dropped = torch.linalg.svdvals(weight.double() @ root)[12:].square().sum()
    lost = {m: output_error(LOW_RANK[m](0.5).compress(weight, inputs) - weight, inputs) for m in LOW_RANK}
    assert lost["svd_llm"] == pytest.approx(float(dropped), rel=1e-3)
    assert lost["svd_llm"] < min(lost["asvd"], lost["svd"])


@pytest.mark.parametrize("shape", [(24, 160), (160, 24)], ids=str)
def test_the_projection_is_the_truncated_decomposition_of_the_whitened_matrix(shape: tuple[int, int]) -> None:
    """SVD-LLM's own form: the singular values of W L, cut, and L^-1 after them."""
    weight, inputs = random_weight(0, *shape), statistics(inputs=shape[1])
    root = torch.linalg.cholesky(inputs.second_moment.double())
    u, sigma, v = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    wanted = torch.linalg.solve_triangular(root, (u[:, :12] * sigma[:12]) @ v[:12], upper=False, left=False)
    torch.testing.assert_close(SVDLLM(0.5).compress(weight, inputs), wanted.float(), rtol=1e-3, atol=1e-3)


def test_ranks_fit_the_panels_and_are_stored_where_they_save() -> None:
    half = SVDLLM(0.5)
    assert [half.rank(*shape) for shape in ((576, 576), (200, 300), (40, 30))] == [288, 96, 15]
    assert [half.stored_rank(*shape) for shape in ((576, 576), (3072, 576), (200, 300))] == [0, 288, 96]
    assert SVDLLM(1.0).rank(70, 70) == 70 and SVDLLM(1.0).stored_rank(70, 70) == 0


def test_factors_are_thin_orthonormal_and_nested() -> None:
    weight, inputs = random_weight(), statistics()
    first, second = SVDLLM(0.5).factors(weight, inputs)
    assert first.shape == (24, 12) and second.shape == (12, 160)
    torch.testing.assert_close(first.T @ first, torch.eye(12, dtype=torch.float64))
    smaller, _ = SVDLLM(0.25).factors(weight, inputs)
    torch.testing.assert_close(smaller, first[:, -6:])


def test_low_rank_takes_fewer_tokens_than_inputs_and_refuses_infinite_ones() -> None:
    weight, inputs = random_weight(), statistics(tokens=20)
    found = SVDLLM(0.9).compress(weight, inputs)
    assert found.isfinite().all() and output_error(found - weight, inputs) < 1e-3
    with pytest.raises(ValueError, match="not finite"):
        SVDLLM(0.5).compress(weight, InputStatistics(inputs.second_moment * torch.inf, inputs.mean_magnitude))


@pytest.mark.parametrize("method", [*PRUNING, *LOW_RANK])
def test_results_do_not_depend_on_chance(method: str) -> None:
    made = PRUNING[method](Sparsity(0.5)) if method in PRUNING else LOW_RANK[method](0.5)
    first, second = (made.compress(random_weight(), statistics()) for _ in range(2))
    assert torch.equal(first, second)


def test_svd_llm_takes_a_moment_that_rounding_has_made_indefinite() -> None:
    moment = torch.ones(8, 8, dtype=torch.float64)
    moment[0, 0] -= 0.5  # a negative eigenvalue, beyond the damping
    weight = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = project(weight, moment, 4)
    assert a.shape == (16, 4) and b.shape == (4, 8) and bool((a @ b).isfinite().all())
    assert torch.allclose(a.T @ a, torch.eye(4, dtype=torch.float64), atol=1e-9)
