"""Calibration: whether a model's confidence is the frequency with which it is right (Guo et al., arXiv 1706.04599)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.verify.comparison import perplexity

BINS = 15
"""Bins of equal width, as in the paper."""


@dataclass(frozen=True)
class Bin:
    """Predictions whose confidence lies in one interval of the width 1 / `BINS`."""

    count: int
    confidence: float
    """Mean confidence."""
    accuracy: float
    """Share that was right."""


def reliability(confidence: Sequence[float], right: Sequence[bool]) -> tuple[Bin, ...]:
    """The reliability diagram: predictions by confidence, without empty bins."""
    c, r = np.asarray(confidence, float), np.asarray(right, float)
    place = np.minimum((c * BINS).astype(int), BINS - 1)
    members = [place == i for i in range(BINS)]
    return tuple(Bin(int(m.sum()), float(c[m].mean()), float(r[m].mean())) for m in members if m.any())


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error, 0..1: the mean over predictions of |accuracy - confidence| of their bin."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / total if total else 0.0


@dataclass(frozen=True)
class TokenCalibration:
    """How well a model predicts the next token of a text, and how well it knows that."""

    tokens: int
    perplexity: float
    accuracy: float
    """Share of positions where the most probable token is the one that follows."""
    confidence: float
    """Mean probability of the most probable token."""
    ece: float
    """Expected calibration error of that probability."""
    brier: float
    """Mean over positions of the squared error of the distribution, 0..2."""
    bins: tuple[Bin, ...]


@dataclass
class TokenCalibrationSums:
    """Collects positions of texts."""

    _loss: float = 0.0
    _brier: float = 0.0
    _confidence: list[float] = field(default_factory=list)
    _right: list[bool] = field(default_factory=list)

    def add(self, logits: Float[torch.Tensor, "t v"], targets: Int[torch.Tensor, " t"]) -> None:
        """Count positions with the tokens that follow them."""
        log_p = torch.log_softmax(logits.float(), -1)
        probability = log_p.exp()
        true = log_p.gather(-1, targets[:, None])[:, 0]
        best, token = probability.max(-1)
        self._loss -= float(true.sum())
        self._brier += float((probability.square().sum(-1) - 2 * true.exp() + 1).sum())
        self._confidence += best.tolist()
        self._right += (token == targets).tolist()

    def result(self) -> TokenCalibration:
        """The measures over all positions counted.

        Raises:
            ValueError: there are none.
        """
        count = len(self._right)
        if not count:
            raise ValueError("a calibration needs at least one position of text, found none")
        bins = reliability(self._confidence, self._right)
        return TokenCalibration(
            count,
            perplexity(self._loss / count),
            sum(self._right) / count,
            sum(self._confidence) / count,
            calibration_error(bins),
            self._brier / count,
            bins,
        )
