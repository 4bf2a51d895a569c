"""What a step of a method takes outside the target's pass on a calibrated machine: drafting, acceptance, the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretell.roofline.calibrate import robust_nnls

MIN_SAMPLES = 12
"""Steps that a fit needs."""
_BLOCK = 6
"""Consecutive steps whose mean is fitted: what happens in some steps only, as learning, belongs to all of them."""


@dataclass(frozen=True)
class DraftingSample:
    """A step: requests in it, tokens drafted for all of them, and its seconds without the target's pass."""

    requests: int
    drafted: int
    seconds: float


@dataclass(frozen=True)
class DraftingTime:
    """Seconds of a step outside the target's pass: fixed, per request, per drafted token of a request (each a
    drafter's pass in a chain), and per drafted token of the batch.
    """

    fixed: float
    per_request: float
    per_depth: float
    per_draft: float

    def seconds(self, requests: float, drafted: float) -> float:
        """Of a step with so many requests, and drafted tokens for each."""
        return self.fixed + self.per_request * requests + self.per_depth * drafted + self.per_draft * drafted * requests


def fit_drafting_time(samples: Sequence[DraftingSample]) -> DraftingTime:
    """Non-negative least squares of the relative error of blocks of steps with as many requests; interrupted ones weigh
    little.

    Raises:
        ValueError: too few samples.
    """
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"the time of drafting is fitted to at least {MIN_SAMPLES} steps, found {len(samples)}")
    table = np.array([_mean_terms(block) for block in _blocks(samples)])
    scale = table.max(0)
    scale[scale == 0] = 1.0
    return DraftingTime(*map(float, robust_nnls(table / scale) / scale))


def _blocks(samples: Sequence[DraftingSample]) -> list[list[DraftingSample]]:
    found = list[list[DraftingSample]]()
    for sample in samples:
        if not found or len(found[-1]) == _BLOCK or found[-1][0].requests != sample.requests:
            found.append([])
        found[-1].append(sample)
    return found


def _mean_terms(block: Sequence[DraftingSample]) -> list[float]:
    """The terms of the mean step of a block over its seconds."""
    requests, count = block[0].requests, len(block)
    drafted, seconds = sum(s.drafted for s in block) / count, sum(s.seconds for s in block) / count
    return [1.0 / seconds, requests / seconds, drafted / requests / seconds, drafted / seconds]
