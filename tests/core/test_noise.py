"""The noise that the target samples with: for requests that sample, where the acceptor lets drafters know it."""

from dataclasses import replace

from foretell.core.noise import target_noise
from foretell.core.sampling import SamplingParams
from helpers import context_of


def test_requests_that_are_greedy_or_not_coupled_have_no_noise() -> None:
    greedy, sampled = context_of([1, 2]), context_of([1, 2], sampling=SamplingParams(temperature=1.0, seed=3))
    assert target_noise(replace(greedy, coupled=True), 4) is None
    assert target_noise(sampled, 4) is None
    noise = target_noise(replace(sampled, coupled=True), 4)
    assert noise is not None
    assert noise.key.shape == (1, 4)
    assert noise.key[0].tolist() == [sampled.rngs[0].key(2 + level) for level in range(4)]
