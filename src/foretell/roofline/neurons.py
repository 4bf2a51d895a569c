"""Predicted time of neurons that lie on two sides, each with a memory and what computes beside it (PowerInfer, arXiv
2312.12456).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from foretell.roofline.hardware import Hardware, MemoryTier


@dataclass(frozen=True)
class Side:
    """A memory, of `bandwidth` bytes per second, and what computes beside it, at `rate` operations per second."""

    name: str
    bandwidth: float
    rate: float = float("inf")

    @staticmethod
    def of(device: Hardware | MemoryTier) -> "Side":
        """The memory of a device with its arithmetic, or a tier that another device computes on."""
        return Side(
            device.name,
            device.bandwidth,
            device.elementwise_rate if isinstance(device, Hardware) else float("inf"),
        )

    def seconds(self, read: float) -> float:
        """Time to read so many bytes of 16-bit weights and multiply them by one token: two operations per weight."""
        return max(read / self.bandwidth, read / self.rate)


@dataclass(frozen=True)
class Sides:
    """Hot neurons are on the fast side. Both work at the same time, and `combine` seconds pass in a layer that has
    neurons on both.
    """

    fast: Side
    slow: Side
    combine: float = 0.0

    def layer_seconds(self, ranked: Float[np.ndarray, " f"], hot: int, neuron_bytes: int) -> float:
        """Time of a layer of which the first `hot` neurons are hot. `ranked`: how often a token reads each neuron."""
        sides = (
            self.fast.seconds(neuron_bytes * ranked[:hot].sum()),
            self.slow.seconds(neuron_bytes * ranked[hot:].sum()),
        )
        return float(max(sides)) + self.combine * (0 < hot < len(ranked))


def predict_placement(
    counts: Int[np.ndarray, "l f"], tokens: int, hot: Sequence[int], neuron_bytes: int, sides: Sides
) -> tuple[float, float]:
    """Seconds of all neurons for one token: where they are placed so and each token reads those that it chooses, and
    where as many whole layers as fit are on the fast side and each token reads all neurons of all layers.

    `counts`: choices in `tokens` tokens.
    """
    ranked = -np.sort(-counts.astype(np.float64), axis=1) / tokens
    placed = sum(sides.layer_seconds(row, n, neuron_bytes) for row, n in zip(ranked, hot, strict=True))
    fast = sum(hot)
    layered = sides.fast.seconds(neuron_bytes * fast) + sides.slow.seconds(neuron_bytes * (counts.size - fast))
    return placed, layered
