"""The sampler: kernels and torch agree to the bit, alone, in batches and on any number of threads; its samples follow
the distribution of plain formulas.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.core.sampling import CounterRNG, SamplingParams, exponential_variates
from foretell.distributions.sampler import kept_tokens, sample
from foretell.model import kernels
from foretell.model.kernels import build
from helpers import gumbel_max, p_value, process
from kernel_builds import other_build

INFINITE = float("inf")
parameters = st.builds(
    dict[str, Any],
    temperature=st.sampled_from([1e-320, 1e-30, 0.01, 0.3, 0.7, 1.0, 2.5, 1e6]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 2000, 1 << 40]),
    top_p=st.sampled_from([1e-300, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0]),
)
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no compiler, or switched off")


def random_logits(rows: int, vocab: int, seed: int, kind: str) -> torch.Tensor:
    x = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return x.round()
    if kind == "equal":
        return torch.full_like(x, 2.5)
    if kind == "infinite":
        x[:, 1::3] = -INFINITE
        x[0, vocab // 2] = INFINITE
    if kind == "nan":
        x[:, 1::2] = torch.nan
    if kind == "one":
        last = x[:, -1].clone()
        x[:] = -INFINITE
        x[:, -1] = last
    return x


@contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_NATIVE", "0")
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@needs_kernels
@given(
    st.lists(parameters, min_size=4, max_size=4),
    st.sampled_from([1, 7, 8, 16, 33, 1000, 9001]),
    st.sampled_from(["normal", "ties", "equal", "infinite", "nan", "one"]),
    st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_kernels_and_torch_agree_alone_and_in_batches(
    values: list[dict[str, Any]], vocab: int, kind: str, seed: int
) -> None:
    sampling = [SamplingParams(**v) for v in values]
    x, keys = random_logits(4, vocab, seed, kind), [CounterRNG(seed).key(i) for i in range(4)]
    found = sample(x, range(4), sampling, keys)
    kept = [kept_tokens(row, s) for row, s in zip(x, sampling, strict=True)]
    for i in range(4):
        assert sample(x, [i], [sampling[i]], [keys[i]]) == [found[i]]
        clocks = exponential_variates(keys[i], kept[i].token) / kept[i].weight
        assert kept[i].token[clocks.argmin()] == found[i]
    with threads(2):
        assert sample(x, range(4), sampling, keys) == found
        assert sample(x, [3], sampling[3:], keys[3:]) == found[3:]
    with without_kernels():
        assert sample(x, range(4), sampling, keys) == found
        for row, s, mine in zip(x, sampling, kept, strict=True):
            theirs = kept_tokens(row, s)
            np.testing.assert_array_equal(mine.token, theirs.token)
            np.testing.assert_array_equal(mine.weight, theirs.weight)


@needs_kernels
def test_portable_kernels_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, sampling = random_logits(8, 5000, 3, "normal"), [SamplingParams(0.7, top_p=0.9), SamplingParams(1.0)] * 4
    found = sample(x, range(8), sampling, range(8))
    plain = other_build("portable")
    monkeypatch.setattr(build, "library", lambda: plain)
    assert sample(x, range(8), sampling, range(8)) == found


@pytest.mark.parametrize("run", [without_kernels, lambda: threads(1)], ids=["torch", "kernels"])
@pytest.mark.parametrize("kind", ["nan", "infinite"])
def test_a_row_without_a_possible_token_is_refused(run: Callable[[], Iterator[None]], kind: str) -> None:
    x = torch.full((2, 20), -INFINITE if kind == "infinite" else torch.nan)
    x[0] = 0.0
    with run(), pytest.raises(ValueError, match="no token can be sampled"):  # type: ignore[attr-defined]
        sample(x, [0, 1], [SamplingParams(1.0)] * 2, [1, 2])
    with run(), pytest.raises(ValueError, match="no token can be sampled"):  # type: ignore[attr-defined]
        kept_tokens(x[1], SamplingParams(1.0, top_p=0.5))


@pytest.mark.parametrize("seed", range(12))
def test_kept_tokens_are_those_of_plain_formulas(seed: int) -> None:
    generator = np.random.default_rng(seed)
    s = SamplingParams(
        temperature=float(generator.choice([0.5, 1.0, 2.0])),
        top_k=int(generator.choice([0, 40, 700])),
        top_p=float(generator.choice([0.3, 0.9, 1.0])),
        min_p=float(generator.choice([0.0, 0.02])),
    )
    x = random_logits(1, 3000, seed, "normal")[0]
    kept, expected = kept_tokens(x, s), process(x.numpy(), [], 0, s)
    # A token that weighs less than 2^-50 of the most probable one is not kept.
    np.testing.assert_array_equal(kept.token, np.flatnonzero(expected > expected.max() * 0.5**51))
    np.testing.assert_allclose(kept.probability, expected[kept.token], rtol=1e-6, atol=1e-12)
    key = CounterRNG(seed).key(5)
    assert sample(x[None], [0], [s], [key]) == [gumbel_max(expected, key)]


@pytest.mark.parametrize("s", [SamplingParams(1.3), SamplingParams(0.8, top_k=5), SamplingParams(1.0, top_p=0.8)])
def test_samples_follow_the_distribution(s: SamplingParams) -> None:
    x, count = random_logits(1, 24, 5, "normal") / 3, 6_000
    tokens = sample(x, [0] * count, [s] * count, [CounterRNG(9).key(i) for i in range(count)])
    assert p_value(np.bincount(tokens, minlength=24), process(x[0].numpy(), [], 0, s)) > 1e-3
