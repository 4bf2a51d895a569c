"""What a step of a method takes outside the target's pass on a calibrated machine: drafting, acceptance, the engine."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.roofline.calibrate import robust_nnls

MIN_SAMPLES = 12
"""Steps that a fit needs."""
_BLOCK = 6
"""Consecutive steps whose mean is fitted: what happens in some steps only, as learning, belongs to all of them."""


@dataclass(frozen=True)
class DraftingSample:
    """A step: requests in it, tokens drafted for all of them, its seconds without the target's pass, and of that pass:
    tokens read, cached tokens of a request, and seconds.
    """

    requests: int
    drafted: int
    seconds: float
    read: int = 0
    context: int = 0
    pass_seconds: float = 0.0


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


def at_predicted_pace(
    samples: Sequence[DraftingSample], predicted: Callable[[DraftingSample], float]
) -> list[DraftingSample]:
    """The steps as they would take where the target's passes take as long as `predicted` for each of them.

    A shared machine is slower in some minutes than in others. Drafting is calibrated later than passes, and a speed-up
    depends on the ratio of the two alone, so all steps are scaled by the median ratio of predicted to measured pass.
    """
    scale = statistics.median(predicted(s) / s.pass_seconds for s in samples)
    return [replace(s, seconds=s.seconds * scale, pass_seconds=s.pass_seconds * scale) for s in samples]


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
    blocks = list[list[DraftingSample]]()
    for sample in samples:
        if not blocks or len(blocks[-1]) == _BLOCK or blocks[-1][0].requests != sample.requests:
            blocks.append([])
        blocks[-1].append(sample)
    return blocks


def _mean_terms(block: Sequence[DraftingSample]) -> list[float]:
    """The terms of the mean step of a block over its seconds."""
    requests, count = block[0].requests, len(block)
    drafted, seconds = sum(s.drafted for s in block) / count, sum(s.seconds for s in block) / count
    return [1.0 / seconds, requests / seconds, drafted / requests / seconds, drafted / seconds]
