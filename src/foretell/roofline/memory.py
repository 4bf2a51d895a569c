"""What has to fit: weights, keys and values, and the most activations alive at once, on each device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.roofline.cost import Rates
from foretell.roofline.linear_cost import Number
from foretell.roofline.op_graph import Network
from foretell.roofline.workload import LIMITS, Phase, cached, extents


@dataclass(frozen=True)
class Memory:
    """Bytes held on one device at the worst moment of a setting; scalars or arrays [settings]."""

    weights: Number
    kv: Number
    activations: Number

    @property
    def total(self) -> Number:
        """All of them."""
        return self.weights + self.kv + self.activations


def weight_bytes(network: Network, r: Rates) -> Number:
    """Bytes of the weights one device holds; what is not cut is copied to every device."""
    held: Number = 0.0
    for block in network.blocks:
        for op in block.ops:
            held = held + block.count * op.stored / (1.0 if op.split == "whole" else r.devices)
    return held * r.weight


def memory(found: Sequence[tuple[Network, Phase]], r: Rates) -> Memory:
    """Memory of a setting given its phases, each with the network it runs."""
    kv: Number = 0.0
    alive: Number = 0.0
    for network, phase in found:
        kept: Number = 0.0
        for block in network.blocks:
            at = extents(network, block, phase)
            if block.kv:
                kept = kept + block.count * block.kv / np.minimum(r.devices, block.kv_heads) * cached(block, phase)
            for whole, cut in block.live:
                alive = np.maximum(alive, _most((whole.at(at) + cut.at(at) / r.devices) * r.activation, phase))
        kv = np.maximum(kv, _most(kept * r.kv, phase))
    return Memory(_flat(weight_bytes(found[0][0], r)), kv, alive)


def _flat(number: Number) -> Number:
    return np.asarray(number, dtype=np.float64).reshape(-1)


def _most(number: Number, phase: Phase) -> Number:
    """Largest over the passes that count."""
    counted = np.where(np.asarray(phase.weight) > 0, number, 0.0)
    return counted.max(-1) if counted.ndim else counted


def largest(name: str, fits: Callable[[int], bool]) -> int:
    """The largest value of a size for which a setting fits, 0 if none does; fitting must be monotone in the size."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < LIMITS[name] and fits(high):
        low, high = high, high * 2
    high = min(high, LIMITS[name])
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scaled(phase: Phase, factor: float) -> Phase:
    """The phase with every group's batch multiplied."""
    return replace(phase, groups=tuple(replace(g, batch=g.batch * factor) for g in phase.groups))
