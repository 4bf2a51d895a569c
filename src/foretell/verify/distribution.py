"""Second check: sampled answers follow the target's own law, by a chi-squared test that says what it could have
seen.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.stats import ncx2

from foretell.core.sampling import SamplingParams, truncate_distribution
from foretell.engine.engine import Request
from foretell.engine.method import AnyMethod
from foretell.model.runner import Runner
from foretell.verify.logits import target_logits
from foretell.verify.run import drafted, run

ALPHA = 1e-3
"""A lossless method fails when what happened, or worse, had less than this chance."""
LENGTH, TOP_K = 3, 3
"""Every continuation of so many tokens, each among the most probable so many, is a cell."""
_MIN_EXPECTED_COUNT = 5.0
_ROWS = 64
_EXACT_TOLERANCE = 1e-6
"""Below this, rounding cannot bring up a token that the exact law forbids."""

Continuation = tuple[int, ...]


@dataclass(frozen=True)
class DistributionTest:
    """Counts of sampled continuations against their exact probabilities."""

    prompt: str
    samples: int
    cells: int
    """After pooling those with small expectation."""
    statistic: float
    degrees_of_freedom: int
    p_value: float
    total_variation: float
    """Total variation between what was counted and the exact law."""
    expected_total_variation: float
    """What `variation` would be on average for the exact law itself, from chance alone."""
    rounding_variation: float
    """Total variation between the law of two readings of the target itself: 0 where its arithmetic is the same for
    every tree.
    """
    effect_size: float
    power: float
    """Chance to fail a method whose law is `effect` away from the exact one in total variation, in the direction
    hardest to see.
    """
    detectable_effect: float
    """The effect that is seen with a chance of 90 %."""
    drafted: int
    accepted: int

    @property
    def passed(self) -> bool:
        """The counts are not beyond what chance and rounding explain."""
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
        paths = {*self.stepwise, *self.single_pass}
        return sum(abs(self.stepwise.get(p, 0.0) - self.single_pass.get(p, 0.0)) for p in paths) / 2


def exact_distribution(runner: Runner, text: str, prompt: Sequence[int]) -> ExactDistribution:
    """Enumerate the continuations of a prompt without the engine."""
    readings = [enumerate_continuations(runner, prompt, at_once) for at_once in (False, True)]
    return ExactDistribution(text, tuple(prompt), *readings)


def enumerate_continuations(runner: Runner, prompt: Sequence[int], single_pass: bool) -> dict[Continuation, float]:
    """Probability of every continuation of `LENGTH` tokens."""
    distribution: dict[Continuation, float] = {(): 1.0}
    for depth in range(LENGTH):
        grown: dict[Continuation, float] = {}
        for path, chance in distribution.items():
            logits = target_logits(runner, [*prompt, *path], depth + 1, single_pass)[-1]
            p = truncate_distribution(torch.softmax(logits.double(), -1), sampling_params(0))
            grown |= {(*path, t): chance * float(p[t]) for t in p.nonzero().flatten().tolist()}
        distribution = grown
    return distribution


def sampling_params(seed: int) -> SamplingParams:
    """Parameters of one sample."""
    return SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed)


def check_distribution(
    runner: Runner,
    make_method: Callable[[], AnyMethod],
    exact: ExactDistribution,
    samples: int,
    seed: int,
    effect_size: float,
) -> DistributionTest:
    """Sample the prompt's continuation with a method, each time with another seed, and compare."""
    requests = [Request(exact.prompt, sampling_params(seed + i), LENGTH) for i in range(samples)]
    results = run(runner, make_method(), requests, _ROWS)
    counts = Counter(r.tokens for r in results)
    paths = sorted({*exact.stepwise, *exact.single_pass})
    first, second = (np.array([m.get(p, 0.0) for p in paths]) for m in (exact.stepwise, exact.single_pass))
    found = np.array([counts[p] for p in paths], np.float64)
    outside = samples - int(found.sum())
    expected = (first + second) / 2 * samples
    blur = float(((first - second) ** 2 / (first + second)).sum()) * samples
    cell = pool_cells(expected)
    impossible = outside > 0 and exact.rounding_variation < _EXACT_TOLERANCE
    statistic, freedom = pearson_statistic(found, expected, cell, outside)
    return DistributionTest(
        prompt=exact.prompt_text,
        samples=samples,
        cells=freedom + 1,
        statistic=statistic,
        degrees_of_freedom=freedom,
        p_value=0.0 if impossible else _p_value(statistic, freedom, blur),
        total_variation=float(np.abs(found - expected).sum() + outside) / 2 / samples,
        expected_total_variation=float(np.sqrt(expected / samples * (1 - expected / samples)).sum())
        * sqrt(1 / (2 * pi * samples)),
        rounding_variation=exact.rounding_variation,
        effect_size=effect_size,
        power=power(effect_size, samples, freedom, blur),
        detectable_effect=detectable_effect(samples, freedom, blur),
        **dict(zip(("drafted", "accepted"), drafted(results), strict=True)),
    )


def pool_cells(expected: Float[np.ndarray, " c"]) -> Int[np.ndarray, " c"]:
    """Which cell of the test each outcome belongs to: those expected less than five times share cell 0, with the next
    rarest if need be.
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
    found: Float[np.ndarray, " c"], expected: Float[np.ndarray, " c"], cell: Int[np.ndarray, " c"], outside: int
) -> tuple[float, int]:
    """Pearson's statistic over pooled cells and its degrees of freedom; outcomes outside every cell count in the
    first.
    """
    o, e = np.bincount(cell, found), np.bincount(cell, expected)
    o[0] += outside
    return float(((o - e) ** 2 / e).sum()), len(e) - 1


def _p_value(statistic: float, freedom: int, noncentrality: float) -> float:
    """Chance of a statistic at least this large; rounding, known from two readings of the target, moves the law a
    little already.
    """
    return float(ncx2.sf(statistic, freedom, noncentrality)) if freedom else 1.0


def power(effect_size: float, samples: int, freedom: int, blur: float) -> float:
    """Chance to see a total variation of `effect`: no law at this distance has a smaller noncentrality than 4 effect²
    per sample.
    """
    if not freedom:
        return 0.0
    critical = float(ncx2.isf(ALPHA, freedom, blur))
    return float(ncx2.sf(critical, freedom, 4 * effect_size**2 * samples))


def detectable_effect(samples: int, freedom: int, blur: float, wanted: float = 0.9) -> float:
    """The total variation that is seen with chance `wanted`; 1 if there is none."""
    if power(1.0, samples, freedom, blur) < wanted:
        return 1.0
    return float(brentq(lambda e: power(e, samples, freedom, blur) - wanted, 0.0, 1.0))
