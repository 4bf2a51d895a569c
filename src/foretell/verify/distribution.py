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
from foretell.verify.logits import scores
from foretell.verify.run import drafted, run

ALPHA = 1e-3
"""A lossless method fails when what happened, or worse, had less than this chance."""
LENGTH, TOP_K = 3, 3
"""Every continuation of so many tokens, each among the most probable so many, is a cell."""
_LEAST = 5.0
_ROWS = 64
_EXACT = 1e-6
"""Below this, rounding cannot bring up a token that the exact law forbids."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class LawTest:
    """Counts of sampled continuations against their exact probabilities."""

    prompt: str
    samples: int
    cells: int
    """After pooling those with small expectation."""
    statistic: float
    freedom: int
    p_value: float
    variation: float
    """Total variation between what was counted and the exact law."""
    floor: float
    """What `variation` would be on average for the exact law itself, from chance alone."""
    rounding: float
    """Total variation between the law of two readings of the target itself: 0 where its arithmetic is the same for
    every tree.
    """
    effect: float
    power: float
    """Chance to fail a method whose law is `effect` away from the exact one in total variation, in the direction
    hardest to see.
    """
    detectable: float
    """The effect that is seen with a chance of 90 %."""
    drafted: int
    accepted: int

    @property
    def passed(self) -> bool:
        """The counts are not beyond what chance and rounding explain."""
        return self.p_value >= ALPHA


@dataclass(frozen=True)
class ExactLaw:
    """Probability of every continuation of a prompt, by two readings that differ in rounding only."""

    text: str
    prompt: tuple[int, ...]
    one_by_one: Mapping[Path, float]
    at_once: Mapping[Path, float]

    @property
    def entropy(self) -> float:
        """In nats."""
        return -sum(p * log(p) for p in self.one_by_one.values() if p > 0)

    @property
    def rounding(self) -> float:
        """Total variation between the readings."""
        paths = {*self.one_by_one, *self.at_once}
        return sum(abs(self.one_by_one.get(p, 0.0) - self.at_once.get(p, 0.0)) for p in paths) / 2


def exact_law(runner: Runner, text: str, prompt: Sequence[int]) -> ExactLaw:
    """Enumerate the continuations of a prompt without the engine."""
    readings = [enumerate_paths(runner, prompt, at_once) for at_once in (False, True)]
    return ExactLaw(text, tuple(prompt), *readings)


def enumerate_paths(runner: Runner, prompt: Sequence[int], at_once: bool) -> dict[Path, float]:
    """Probability of every continuation of `LENGTH` tokens."""
    distribution: dict[Path, float] = {(): 1.0}
    for depth in range(LENGTH):
        grown: dict[Path, float] = {}
        for path, chance in distribution.items():
            logits = scores(runner, [*prompt, *path], depth + 1, at_once)[-1]
            p = truncate_distribution(torch.softmax(logits.double(), -1), sampling(0))
            grown |= {(*path, t): chance * float(p[t]) for t in p.nonzero().flatten().tolist()}
        distribution = grown
    return distribution


def sampling(seed: int) -> SamplingParams:
    """Parameters of one sample."""
    return SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed)


def check_law(
    runner: Runner, make: Callable[[], AnyMethod], distribution: ExactLaw, samples: int, seed: int, effect: float
) -> LawTest:
    """Sample the prompt's continuation with a method, each time with another seed, and compare."""
    requests = [Request(distribution.prompt, sampling(seed + i), LENGTH) for i in range(samples)]
    results = run(runner, make(), requests, _ROWS)
    counts = Counter(r.tokens for r in results)
    paths = sorted({*distribution.one_by_one, *distribution.at_once})
    first, second = (np.array([m.get(p, 0.0) for p in paths]) for m in (distribution.one_by_one, distribution.at_once))
    found = np.array([counts[p] for p in paths], np.float64)
    outside = samples - int(found.sum())
    expected = (first + second) / 2 * samples
    blur = float(((first - second) ** 2 / (first + second)).sum()) * samples
    cell = pool(expected)
    impossible = outside > 0 and distribution.rounding < _EXACT
    statistic, freedom = pearson(found, expected, cell, outside)
    return LawTest(
        prompt=distribution.text,
        samples=samples,
        cells=freedom + 1,
        statistic=statistic,
        freedom=freedom,
        p_value=0.0 if impossible else _tail(statistic, freedom, blur),
        variation=float(np.abs(found - expected).sum() + outside) / 2 / samples,
        floor=float(np.sqrt(expected / samples * (1 - expected / samples)).sum()) * sqrt(1 / (2 * pi * samples)),
        rounding=distribution.rounding,
        effect=effect,
        power=power(effect, samples, freedom, blur),
        detectable=detectable(samples, freedom, blur),
        **dict(zip(("drafted", "accepted"), drafted(results), strict=True)),
    )


def pool(expected: Float[np.ndarray, " c"]) -> Int[np.ndarray, " c"]:
    """Which cell of the test each outcome belongs to: those expected less than five times share cell 0, with the next
    rarest if need be.
    """
    order = np.argsort(expected, kind="stable")
    rare = int((expected < _LEAST).sum())
    while 0 < rare < len(expected) and expected[order[:rare]].sum() < _LEAST:
        rare += 1
    cell = np.empty(len(expected), np.int64)
    cell[order[:rare]] = 0
    cell[order[rare:]] = np.arange(len(expected) - rare) + (rare > 0)
    return cell


def pearson(
    found: Float[np.ndarray, " c"], expected: Float[np.ndarray, " c"], cell: Int[np.ndarray, " c"], outside: int
) -> tuple[float, int]:
    """Pearson's statistic over pooled cells and its degrees of freedom; outcomes outside every cell count in the
    first.
    """
    o, e = np.bincount(cell, found), np.bincount(cell, expected)
    o[0] += outside
    return float(((o - e) ** 2 / e).sum()), len(e) - 1


def _tail(statistic: float, freedom: int, noncentrality: float) -> float:
    """Chance of a statistic at least this large; rounding, known from two readings of the target, moves the law a
    little already.
    """
    return float(ncx2.sf(statistic, freedom, noncentrality)) if freedom else 1.0


def power(effect: float, samples: int, freedom: int, blur: float) -> float:
    """Chance to see a total variation of `effect`: no law at this distance has a smaller noncentrality than 4 effect²
    per sample.
    """
    if not freedom:
        return 0.0
    critical = float(ncx2.isf(ALPHA, freedom, blur))
    return float(ncx2.sf(critical, freedom, 4 * effect**2 * samples))


def detectable(samples: int, freedom: int, blur: float, wanted: float = 0.9) -> float:
    """The total variation that is seen with chance `wanted`; 1 if there is none."""
    if power(1.0, samples, freedom, blur) < wanted:
        return 1.0
    return float(brentq(lambda e: power(e, samples, freedom, blur) - wanted, 0.0, 1.0))
