"""Paired bootstrap of changes: how far they would differ on other texts and probes of the same kind (percentile
bootstrap, Efron 1979). Both models are resampled together, on the same stretches of text and the same probes.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.distributions.divergence import forward_kl, total_variation

Tensor = torch.Tensor
Interval = tuple[float, float]
CONFIDENCE, RESAMPLES = 0.95, 2000
STRETCH = 64
"""Consecutive positions that are resampled together, because neighbours are alike."""


class PairedSums:
    """Sums over stretches of a text: positions, KL, total variation, other most probable tokens, and the losses of both
    models.
    """

    def __init__(self) -> None:
        self._rows: list[list[float]] = []

    def add(self, p: Float[Tensor, "t v"], q: Float[Tensor, "t v"], targets: Int[Tensor, " t"]) -> None:
        """Count consecutive positions: logits of the other model and of this one, and the tokens that follow."""
        kl, variation = forward_kl(p, q).clamp(min=0), total_variation(p, q)
        changed = (p.argmax(-1) != q.argmax(-1)).float()
        losses = [torch.nn.functional.cross_entropy(logits, targets, reduction="none") for logits in (p, q)]
        columns = torch.stack([torch.ones_like(kl), kl, variation, changed, *losses], 1).double()
        self._rows += [part.sum(0).tolist() for part in torch.split(columns, STRETCH)]

    def intervals(self, seed: int = 0) -> Mapping[str, Interval]:
        """Of the changes of a text's measures."""
        rows = np.array(self._rows)
        measures: Mapping[str, Callable[[Float[np.ndarray, "r 6"]], Float[np.ndarray, " r"]]] = {
            "kl": lambda s: s[:, 1] / s[:, 0],
            "total_variation": lambda s: s[:, 2] / s[:, 0],
            "changed_tokens": lambda s: s[:, 3] / s[:, 0],
            "perplexity_ratio": lambda s: np.exp((s[:, 5] - s[:, 4]) / s[:, 0]),
        }
        drawn = _resampled(rows, seed)
        return {name: _between(of(drawn)) for name, of in measures.items()}


def share_interval(happened: Sequence[bool] | Bool[np.ndarray, " n"], seed: int = 0) -> Interval:
    """Of the share of cases in which something happened."""
    rows = np.array(happened, float)[:, None]
    return _between(_resampled(rows, seed)[:, 0] / len(rows))


def _resampled(rows: Float[np.ndarray, "n c"], seed: int) -> Float[np.ndarray, "r c"]:
    """Sums over as many rows as there are, drawn with replacement."""
    chosen = np.random.default_rng(seed).integers(0, len(rows), (RESAMPLES, len(rows)))
    sums: Float[np.ndarray, "r c"] = rows[chosen].sum(1)
    return sums


def _between(values: Float[np.ndarray, " r"]) -> Interval:
    low, high = np.percentile(values, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return float(low), float(high)
