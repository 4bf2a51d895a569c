"""Second check: sampled answers follow the target's distribution, by Pearson's chi-squared test.

The test also reports its power: how small a difference it would have detected.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.stats import ncx2

from foretell.core.sampling import SamplingParams
from foretell.distributions.sampler import kept_tokens
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.model.run.runner import Runner
from foretell.verify.logits import target_logits

ALPHA = 1e-3
"""Significance level: a lossless method fails with a p-value below it."""
LENGTH, TOP_K = 3, 3
"""An outcome of the test is a continuation of `LENGTH` tokens, each among the `TOP_K` most probable."""
_MIN_EXPECTED_COUNT = 5.0
"""Outcomes with a smaller expected count are pooled, as usual for the chi-squared test."""
_ROWS = 64
"""Samples that are decoded together."""
_EXACT_TOLERANCE = 1e-6
"""Total variation between two readings below which rounding cannot produce a token of probability 0."""
_WANTED_POWER = 0.9

Continuation = tuple[int, ...]


@dataclass(frozen=True)
class DistributionTest:
    """Counts of sampled continuations compared with their exact probabilities."""

    prompt: str
    samples: int
    cells: int
    """After pooling outcomes with a small expected count."""
    statistic: float
    degrees_of_freedom: int
    p_value: float
    total_variation: float
    """Between the sampled frequencies and the exact distribution."""
    expected_total_variation: float
    """Mean of `total_variation` for samples of the exact distribution itself."""
    rounding_variation: float
    """Total variation between two readings of the target: 0 where the arithmetic is the same for every tree."""
    effect_size: float
    power: float
    """Chance to reject a distribution at a total variation of `effect_size`, in the direction hardest to detect."""
    detectable_effect: float
    """The effect size that is detected with a power of 90 %."""
    drafted: int
    accepted: int

    @property
    def passed(self) -> bool:
        """Whether chance and rounding explain the counts."""
        return self.p_value >= ALPHA


@dataclass(frozen=True)
class ExactDistribution:
    """Probability of every continuation of a prompt, by two readings that differ in rounding only."""

    prompt_text: str
    prompt: tuple[int, ...]
    stepwise: Mapping[Continuation, float]
    single_pass: Mapping[Continuation, float]

    @property
    def entropy(self) -> float:
        """In nats."""
        return -sum(p * log(p) for p in self.stepwise.values() if p > 0)

    @property
    def rounding_variation(self) -> float:
        """Total variation between the readings."""
        continuations = {*self.stepwise, *self.single_pass}
        return sum(abs(self.stepwise.get(c, 0.0) - self.single_pass.get(c, 0.0)) for c in continuations) / 2


def exact_distribution(runner: Runner, text: str, prompt: Sequence[int]) -> ExactDistribution:
    """Enumerate the continuations of a prompt without the engine."""
    readings = [enumerate_continuations(runner, prompt, single_pass) for single_pass in (False, True)]
    return ExactDistribution(text, tuple(prompt), *readings)


def enumerate_continuations(runner: Runner, prompt: Sequence[int], single_pass: bool) -> dict[Continuation, float]:
    """Probability of every continuation of `LENGTH` tokens."""
    distribution: dict[Continuation, float] = {(): 1.0}
    for depth in range(LENGTH):
        longer: dict[Continuation, float] = {}
        for prefix, probability in distribution.items():
            logits = target_logits(runner, [*prompt, *prefix], depth + 1, single_pass)[-1]
            kept = kept_tokens(logits, sampling_params(0))
            pairs = zip(kept.token.tolist(), kept.probability.tolist(), strict=True)
            longer |= {(*prefix, token): probability * p for token, p in pairs}
        distribution = longer
    return distribution


def sampling_params(seed: int) -> SamplingParams:
    """Parameters of one sample."""
    return SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed)


def check_distribution(
    runner: Runner, method: AnyMethod, exact: ExactDistribution, samples: int, seed: int, effect_size: float
) -> DistributionTest:
    """Sample continuations of the prompt with a method, each with another seed, and test their distribution."""
    requests = [Request(exact.prompt, sampling_params(seed + i), LENGTH) for i in range(samples)]
    completions = Engine(runner, method, rows=_ROWS).complete(requests)
    counts = Counter(c.tokens for c in completions)
    continuations = sorted({*exact.stepwise, *exact.single_pass})
    stepwise, single_pass = (
        np.array([m.get(c, 0.0) for c in continuations]) for m in (exact.stepwise, exact.single_pass)
    )
    observed = np.array([counts[c] for c in continuations], np.float64)
    outside = samples - int(observed.sum())
    probabilities = (stepwise + single_pass) / 2
    expected = probabilities * samples
    noncentrality = float(((stepwise - single_pass) ** 2 / (stepwise + single_pass)).sum()) * samples
    statistic, freedom = pearson_statistic(observed, expected, pool_cells(expected), outside)
    impossible = outside > 0 and exact.rounding_variation < _EXACT_TOLERANCE
    deviations = np.sqrt(probabilities * (1 - probabilities))
    return DistributionTest(
        prompt=exact.prompt_text,
        samples=samples,
        cells=freedom + 1,
        statistic=statistic,
        degrees_of_freedom=freedom,
        p_value=0.0 if impossible else _p_value(statistic, freedom, noncentrality),
        total_variation=float(np.abs(observed - expected).sum() + outside) / 2 / samples,
        expected_total_variation=float(deviations.sum()) * sqrt(1 / (2 * pi * samples)),
        rounding_variation=exact.rounding_variation,
        effect_size=effect_size,
        power=power(effect_size, samples, freedom, noncentrality),
        detectable_effect=detectable_effect(samples, freedom, noncentrality),
        drafted=sum(c.statistics.drafted for c in completions),
        accepted=sum(sum(c.statistics.accepted_per_position) for c in completions),
    )


def pool_cells(expected: Float[np.ndarray, " c"]) -> Int[np.ndarray, " c"]:
    """Cell of the test for every outcome.

    Outcomes with an expected count below 5 share cell 0, with the next rarest ones if that has too few still.
    """
    order = np.argsort(expected, kind="stable")
    rare = int((expected < _MIN_EXPECTED_COUNT).sum())
    while 0 < rare < len(expected) and expected[order[:rare]].sum() < _MIN_EXPECTED_COUNT:
        rare += 1
    cell = np.empty(len(expected), np.int64)
    cell[order[:rare]] = 0
    cell[order[rare:]] = np.arange(len(expected) - rare) + (rare > 0)
    return cell


def pearson_statistic(
    observed: Float[np.ndarray, " c"], expected: Float[np.ndarray, " c"], cell: Int[np.ndarray, " c"], outside: int
) -> tuple[float, int]:
    """Pearson's statistic over pooled cells, and its degrees of freedom. `outside`: other samples, put into cell 0."""
    o, e = np.bincount(cell, observed), np.bincount(cell, expected)
    o[0] += outside
    return float(((o - e) ** 2 / e).sum()), len(e) - 1


def _p_value(statistic: float, freedom: int, noncentrality: float) -> float:
    """Chance of a statistic at least this large. `noncentrality`: what rounding of the target contributes."""
    return float(ncx2.sf(statistic, freedom, noncentrality)) if freedom else 1.0


def power(effect_size: float, samples: int, freedom: int, noncentrality: float) -> float:
    """Chance to detect a total variation of `effect_size`.

    Every distribution at this distance has a noncentrality of at least 4 effect_size² per sample.
    """
    if not freedom:
        return 0.0
    critical = float(ncx2.isf(ALPHA, freedom, noncentrality))
    return float(ncx2.sf(critical, freedom, 4 * effect_size**2 * samples))


def detectable_effect(samples: int, freedom: int, noncentrality: float) -> float:
    """The total variation that is detected with the power that is wanted; 1 if there is none."""
    if power(1.0, samples, freedom, noncentrality) < _WANTED_POWER:
        return 1.0
    return float(brentq(lambda e: power(e, samples, freedom, noncentrality) - _WANTED_POWER, 0.0, 1.0))
