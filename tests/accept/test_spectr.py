"""SpecTr: exactness by enumeration, its guarantees, and end to end."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.accept import KSequentialSelection
from foretell.accept.spectr import division_factor, residual_after_rejections
from foretell.core.context import Context, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.shape import BranchingTree, Chain
from helpers import exact_distribution, generate, p_value, small_model, target, unchecked


def distributions(vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random distributions, some entries zero."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, vocab, generator=generator, dtype=torch.float64) ** 3
    if seed % 3 == 1:
        p[0] = 0
    if seed % 3 == 2:
        q[-1] = 0
    return p / p.sum(), q / q.sum()


def beta_of(p: torch.Tensor, q: torch.Tensor, rho: float) -> float:
    return float(torch.minimum(q, p / rho).sum())


def outcome(p: torch.Tensor, q: torch.Tensor, draws: int) -> tuple[torch.Tensor, float]:
    """The distribution of the new token over all samples, and the probability that one of them is accepted."""
    rho = division_factor(p, q, draws)
    out, accepted = torch.zeros_like(p), 0.0
    for tokens in itertools.product(range(len(p)), repeat=draws):
        chance = float(q[list(tokens)].prod())
        for token in tokens:
            part = min(1.0, float(p[token] / (rho * q[token]))) if q[token] > 0 else 0.0
            out[token] += chance * part
            accepted += chance * part
            chance *= 1 - part
        left = residual_after_rejections(p, q, draws, rho)
        out += chance * left / left.sum()
    return out, accepted


@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("seed", range(9))
def test_the_distribution_is_exact(draws: int, seed: int) -> None:
    p, q = distributions(4, seed)
    out, accepted = outcome(p, q, draws)
    assert float((out - p).abs().sum()) / 2 < 1e-12
    beta = beta_of(p, q, division_factor(p, q, draws))
    assert accepted == pytest.approx(1 - (1 - beta) ** draws, abs=1e-12)


@pytest.mark.parametrize("seed", range(9))
def test_the_guarantees_of_the_factor(seed: int) -> None:
    p, q = distributions(6, seed)
    assert division_factor(p, q, 1) == 1
    before = 0.0
    for draws in (1, 2, 3, 5):
        rho = division_factor(p, q, draws)
        beta = beta_of(p, q, rho)
        chance = 1 - (1 - beta) ** draws
        raw = p - torch.minimum(q, p / rho) * (chance / beta)
        best = float(torch.minimum(p, 1 - (1 - q) ** draws).sum())
        assert float(raw.min()) >= -1e-12
        assert float(raw.sum()) == pytest.approx(1 - chance, abs=1e-12)
        assert before - 1e-12 <= chance <= best + 1e-12
        assert chance >= (1 - (1 - 1 / draws) ** draws) * best - 1e-12
        before = chance
    beta = beta_of(q, q, division_factor(q, q, 3))
    assert 1 - (1 - beta) ** 3 == pytest.approx(1)


def test_accepts_more_than_recursive_rejection() -> None:
    def recursive(p: torch.Tensor, q: torch.Tensor, draws: int) -> float:
        refused = 1.0
        for _ in range(draws):
            refused *= 1 - float(torch.minimum(p, q).sum())
            p = (p - q).clamp_min(0)
            p = p / p.sum()
        return 1 - refused

    for seed in range(0, 30, 3):
        p, q = distributions(5, seed)
        assert 1 - (1 - beta_of(p, q, division_factor(p, q, 3))) ** 3 >= recursive(p, q, 3) - 1e-9


def test_disjoint_distributions_leave_that_of_the_target() -> None:
    p, q = torch.tensor([0.5, 0.5, 0, 0]).double(), torch.tensor([0, 0, 0.25, 0.75]).double()
    assert torch.equal(residual_after_rejections(p, q, 3, division_factor(p, q, 3)), p)


def method(vocab: int, widths: tuple[int, ...]) -> Method:  # type: ignore[type-arg]
    return Method(small_model(vocab), BranchingTree(widths, distinct=False), KSequentialSelection())


@pytest.mark.exhaustive_types
def test_the_distribution_of_whole_answers() -> None:
    vocab, length, prompt, count = 3, 3, [1, 2, 0, 1], 500
    sampling = SamplingParams(temperature=8, frequency_penalty=0.4)
    distribution = exact_distribution(target(vocab), prompt, length, sampling)
    requests = [Request(prompt, replace(sampling, seed=s), max_new_tokens=length) for s in range(count)]
    with unchecked():
        answers = generate(method(vocab, (3, 1, 1)), requests, rows=512, chunk=1 << 14, vocab=vocab)
    index = np.array(answers) @ vocab ** np.arange(length)[::-1]
    assert p_value(np.bincount(index, minlength=len(distribution)), distribution) > 1e-3


@pytest.mark.exhaustive_types
def test_parallel_chains_are_independent() -> None:
    """Equal samples at a node have independent next tokens."""
    same = agree = 0
    draft = small_model(5)
    for seed in range(80):
        sampling = SamplingParams(temperature=4, seed=seed)
        context = Context((0,), (TokenBuffer([1, 2, 3]),), (sampling,), (CounterRNG(seed),), np.array([9]))
        tree = BranchingTree((2, 1), distinct=False).grow(draft, context)
        first, second = tree.token[0, 1:3], tree.token[0, 3:5]
        if first[0] == first[1]:
            same += 1
            agree += int(second[0] == second[1])
    assert 0 < agree < same


def test_samples_without_replacement_are_refused() -> None:
    bad = Method(small_model(5), BranchingTree((2,)), KSequentialSelection())
    with pytest.raises(ValueError, match="distinct=False"):
        generate(bad, [Request([1, 2], SamplingParams(temperature=1), max_new_tokens=4)], vocab=5)


def test_greedy_drafts_follow_the_target() -> None:
    request = Request([3, 1, 4], max_new_tokens=12)
    plain = generate(Method(small_model(29), Chain(0), KSequentialSelection()), [request])
    assert generate(method(29, (3, 1, 1)), [request]) == plain
