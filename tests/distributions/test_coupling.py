"""Drafting with the target's noise: what a perfect drafter drafts is what the target samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.noise import LevelNoise
from foretell.core.sampling import SamplingParams, exponential_variates
from foretell.distributions.coupling import add_noise, gumbel_noise
from foretell.distributions.sampler import sample
from foretell.model import kernels

KEYS = np.random.default_rng(1).integers(0, 1 << 64, 200, np.uint64)
SAMPLED = SamplingParams(temperature=1.0)


@contextmanager
def backend(monkeypatch: pytest.MonkeyPatch, native: bool) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if not native:
            patch.setattr(kernels, "available", lambda: False)
        elif not kernels.available():
            pytest.skip("the CPU kernels are not available")
        yield


def noise_of(key: int, *params: SamplingParams) -> LevelNoise:
    """Of requests whose only frontier node is their root."""
    return LevelNoise(params, np.full(len(params), key, np.uint64), np.zeros((len(params), 1), np.int64))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tokens", [None, np.array([40000, 3, 17, 2, 9, 31, 8, 12, 5, 77])])
def test_the_noise_is_that_of_the_sampler(monkeypatch: pytest.MonkeyPatch, native: bool, tokens: Any) -> None:
    width = 5003 if tokens is None else len(tokens)
    with backend(monkeypatch, native):
        found = gumbel_noise(KEYS[:3], width, torch.device("cpu"), tokens)
    variates = [exponential_variates(int(key), np.arange(width) if tokens is None else tokens) for key in KEYS[:3]]
    np.testing.assert_allclose(found.numpy(), -np.log(variates), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        SamplingParams(temperature=0.4),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=2.0, min_p=0.2),
    ],
    ids=lambda p: f"{p.temperature}-{p.top_p}-{p.top_k}-{p.min_p}",
)
def test_the_target_s_own_logits_rank_its_choice_first(
    monkeypatch: pytest.MonkeyPatch, native: bool, params: SamplingParams
) -> None:
    logits = 2 * torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    with backend(monkeypatch, native):
        for row, key in zip(logits, KEYS.tolist(), strict=True):
            ranked = add_noise(row[None], np.zeros((1, 1), np.int64), noise_of(key, params))
            assert [int(ranked.argmax())] == sample(row[None], [0], [params], [key])


def test_a_drafter_with_errors_that_knows_the_noise_is_right_more_often() -> None:
    """Of 200 positions of a flat distribution, of which the drafter knows each logit with an error."""
    generator, hits, best = torch.Generator().manual_seed(1), 0, 0
    for key in KEYS.tolist():
        logits = torch.randn(1, 30, generator=generator)
        drafted = logits + 0.5 * torch.randn(1, 30, generator=generator)
        (drawn,) = sample(logits, [0], [SAMPLED], [key])
        hits += int(add_noise(drafted, np.zeros((1, 1), np.int64), noise_of(key, SAMPLED)).argmax()) == drawn
        best += int(drafted.argmax()) == drawn
    assert hits > 120 > 2 * best


def test_requests_that_do_not_sample_keep_their_logits() -> None:
    """Requests 0 and 2 sample; request 1 does not, and request 2 has no logits at its frontier."""
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    noise = noise_of(7, SAMPLED, SamplingParams(), SAMPLED)
    ranked = add_noise(logits, np.array([[2, 0], [1, -1], [-1, 3]]), noise)
    changed = (ranked != logits).any(1).tolist()
    assert changed == [False, False, True, False]
    assert torch.equal(ranked[2], logits[2] + gumbel_noise(noise.key[:1], 12, logits.device)[0])
