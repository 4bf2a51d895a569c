"""Memory that a workload needs on each device: weights, KV cache, and peak activations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.roofline.cost import DeviceRates
from foretell.roofline.linear_cost import Number
from foretell.roofline.op_graph import OpGraph
from foretell.roofline.workload import LIMITS, Phase, cached_positions, phase_extents


@dataclass(frozen=True)
class MemoryUse:
    """Peak bytes on one device; scalars or arrays [workloads]."""

    weights: Number
    kv: Number
    activations: Number

    @property
    def total(self) -> Number:
        """All of them."""
        return self.weights + self.kv + self.activations


def weight_bytes(graph: OpGraph, rates: DeviceRates) -> Number:
    """Bytes of the weights on one device."""
    total: Number = 0.0
    for group in graph.groups:
        for op in group.ops:
            per_device = group.count * op.stored / (1.0 if op.split == "replicated" else rates.devices)
            total = total + per_device * (rates.head if op.is_vocabulary else rates.weight)
    return total


def memory_use(phase_graphs: Sequence[tuple[OpGraph, Phase]], rates: DeviceRates) -> MemoryUse:
    """Peak memory of a workload, given its phases, each with the graph that it runs."""
    kv: Number = 0.0
    activations: Number = 0.0
    for graph, phase in phase_graphs:
        kv_elements: Number = 0.0
        for group in graph.groups:
            extents = phase_extents(graph, group, phase)
            if group.kv_elements:
                per_device = group.kv_elements / np.minimum(rates.devices, group.kv_heads)
                kv_elements = kv_elements + group.count * per_device * cached_positions(group, phase)
            if group.state_elements:
                per_device = group.state_elements / np.minimum(rates.devices, group.kv_heads)
                kv_elements = kv_elements + group.count * per_device * extents.sequences
            for replicated, divided in group.live_activations:
                live = replicated.evaluate(extents) + divided.evaluate(extents) / rates.devices
                activations = np.maximum(activations, _max_over_passes(live * rates.activation, phase))
        kv = np.maximum(kv, _max_over_passes(kv_elements * rates.kv, phase))
    weights = np.asarray(weight_bytes(phase_graphs[0][0], rates), dtype=np.float64).reshape(-1)
    return MemoryUse(weights, kv, activations)


def _max_over_passes(number: Number, phase: Phase) -> Number:
    """Maximum over the passes that are not padding."""
    counted = np.where(np.asarray(phase.repeats) > 0, number, 0.0)
    return counted.max(-1) if counted.ndim else counted


def largest_fitting(size: str, fits: Callable[[int], bool]) -> int:
    """The largest value of the size named `size` that fits, 0 if none does; `fits` must be monotone."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < LIMITS[size] and fits(high):
        low, high = high, high * 2
    high = min(high, LIMITS[size])
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
