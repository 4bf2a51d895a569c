"""Drafting with the target's noise: what a perfect drafter drafts is what the target samples."""

from dataclasses import replace

import numpy as np
import torch

from foretell.core.noise import target_noise
from foretell.core.sampling import SamplingParams
from foretell.distributions.sampler import sample
from helpers import context_of

SAMPLING = SamplingParams(temperature=1.0, seed=3)


def test_requests_that_are_greedy_or_not_coupled_have_no_noise() -> None:
    greedy, sampled = context_of([1, 2]), context_of([1, 2], sampling=SAMPLING)
    assert target_noise(replace(greedy, coupled=True), 4) is None
    assert target_noise(sampled, 4) is None
    noise = target_noise(replace(sampled, coupled=True), 4)
    assert noise is not None
    assert noise.key.shape == (1, 4)


def test_tokens_ranked_with_the_noise_are_sampled_more_often() -> None:
    """Of 200 positions of a flat distribution, a drafter that knows the noise predicts most, by rank 0."""
    logits, hits, best = torch.randn(200, 30, generator=torch.Generator().manual_seed(1)), 0, 0
    for position, row in enumerate(logits):
        context = replace(context_of([1] * (position + 1), sampling=SAMPLING), coupled=True)
        noise = target_noise(context, 1)
        assert noise is not None
        p = torch.softmax(row.double(), -1).numpy()
        order = np.argsort(-p)
        probability, token = noise.rank(0, 0, p[order], order)
        assert np.isclose(probability.sum(), 1)
        assert (np.diff(probability) <= 0).all()
        (drawn,) = sample(row[None], [0], [SAMPLING], [int(noise.key[0, 0])])
        hits, best = hits + (token[0] == drawn), best + (order[0] == drawn)
    assert hits > 120 > 2 * best
