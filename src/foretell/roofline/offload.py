"""Offloading of weights and KV cache: streamed to the device over the host link, or computed on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.roofline.analysis import Analysis, largest_sizes
from foretell.roofline.cost import OpCost, scalar
from foretell.roofline.hardware import Hardware, MemoryTier
from foretell.roofline.linear_cost import Number
from foretell.roofline.memory import MemoryUse
from foretell.roofline.names import look_up

CAPACITY_FOR_WEIGHTS = 0.8
"""Part of a device's memory that holds weights when a model does not fit, as in the baseline of arXiv 2402.12374."""


@dataclass(frozen=True)
class Offload:
    """The parts of weights and KV cache that are in a memory tier, and where they are computed: `device` or `host`.

    Raises:
        ValueError: a part outside 0 to 1, or another place of computation.
    """

    tier: MemoryTier
    weights: float = 1.0
    kv: float = 0.0
    compute: str = "device"

    def __post_init__(self) -> None:
        for name, part in (("weights", self.weights), ("kv", self.kv)):
            if not 0 <= part <= 1:
                raise ValueError(f"the offloaded part of {name} must lie between 0 and 1, found {part:g}")
        if self.compute not in ("device", "host"):
            raise ValueError(f"offloaded data are computed on the device or on the host, not on {self.compute!r}")


@dataclass(frozen=True)
class PlacedOffload:
    """An offload on a device; `host`: the processor that computes beside the tier, None: the device computes."""

    offload: Offload
    device: Hardware
    host: Hardware | None


def place_offload(offload: Offload, device: Hardware, hardware: Mapping[str, Hardware]) -> PlacedOffload:
    """Find what fetches and computes the offloaded data.

    Raises:
        ValueError: the device states no host link, or no processor is known beside the tier.
    """
    if offload.compute == "device" and not device.host_bandwidth:
        raise ValueError(f"hardware {device.name!r} states no link to host memory; compute on the host instead")
    if offload.compute == "host" and offload.tier.compute is None:
        raise ValueError(f"no processor is known beside {offload.tier.name!r}; compute on the device instead")
    host = None
    if offload.compute == "host" and offload.tier.compute:
        host = look_up(hardware, offload.tier.compute, "hardware")
    return PlacedOffload(offload, device, host)


@dataclass(frozen=True)
class PlacedOp:
    """An operation in one layer under offloading: its seconds, the bytes fetched for it, and what bounds it."""

    seconds: float
    fetched: float
    bound: str


@dataclass(frozen=True)
class OffloadResult:
    """Time of the workload, bytes left on the device, bytes fetched from the tier, what bounds the time, and the
    largest sizes that fit; None: capacity unknown.
    """

    seconds: float
    resident: float
    fetched: float
    bound: str
    largest_batch: int | None
    longest_context: int | None


def apply_offload(analysis: Analysis, placed: PlacedOffload) -> OffloadResult:
    """The predicted cost of an analysed workload under offloading.

    On the device, an operation takes the longest of fetching, memory and compute time, which overlap (FlexGen, arXiv
    2303.06865). On the host, device and host compute their parts one after the other.
    """
    seconds_by_bound = {"compute": 0.0, "memory": 0.0, "link": 0.0, "host": 0.0}
    seconds = fetched = 0.0
    for each in analysis.op_costs:
        op = place_op(each, placed)
        seconds, fetched = seconds + op.seconds * each.count, fetched + op.fetched * each.count
        seconds_by_bound[op.bound] += op.seconds * each.count
    bound = max(seconds_by_bound, key=lambda name: seconds_by_bound[name])
    sizes = largest_sizes(
        analysis.model,
        analysis.hardware,
        analysis.workload,
        lambda memory: resident_memory(memory, placed.offload).total,
    )
    return OffloadResult(seconds, resident_bytes(analysis, placed.offload), fetched, bound, *sizes)


def place_op(op_cost: OpCost, placed: PlacedOffload) -> PlacedOp:
    """One operation under offloading."""
    times = _times(op_cost, placed)
    alternatives = {name: scalar(value) for name, value in times.items()}
    return PlacedOp(
        scalar(_op_seconds(op_cost, times, placed)),
        scalar(_offloaded_bytes(op_cost, placed)),
        max(alternatives, key=lambda name: alternatives[name]),
    )


def resident_bytes(analysis: Analysis, offload: Offload) -> float:
    """Bytes of a workload that stay on the device."""
    return scalar(resident_memory(analysis.memory, offload).total)


def resident_memory(memory: MemoryUse, offload: Offload) -> MemoryUse:
    """What of the memory stays on the device."""
    return MemoryUse(memory.weights * (1 - offload.weights), memory.kv * (1 - offload.kv), memory.activations)


def offloaded_seconds(costs: Sequence[OpCost], placed: PlacedOffload) -> Number:
    """Seconds of all operations under offloading, an element for each workload of the costs."""
    total: Number = 0.0
    for each in costs:
        total = total + _op_seconds(each, _times(each, placed), placed) * each.count
    return total


def share_outside(weight_bytes: float, hardware: Hardware) -> float:
    """Part of the weights that does not fit beside the cache and the activations on a device, 0 to 1.

    Raises:
        ValueError: the capacity of the device is not stated.
    """
    if hardware.capacity is None:
        raise ValueError(f"hardware {hardware.name!r} states no capacity, so what fits cannot be told")
    return max(0.0, 1 - CAPACITY_FOR_WEIGHTS * hardware.capacity / weight_bytes)


def _offloaded_bytes(op_cost: OpCost, placed: PlacedOffload) -> Number:
    cost, offload = op_cost.cost, placed.offload
    return cost.weights * offload.weights + (cost.kv_read + cost.kv_write) * offload.kv


def _times(op_cost: OpCost, placed: PlacedOffload) -> dict[str, Number]:
    """Seconds of what may bound an operation: of the device's memory and arithmetic, and of the link or the host."""
    offload, cost = placed.offload, op_cost.cost
    if placed.host is None:
        link = min(placed.device.host_bandwidth * placed.device.runtime.host, offload.tier.bandwidth)
        fetching = _offloaded_bytes(op_cost, placed) / link
        return {"link": fetching, "memory": cost.memory_seconds, "compute": cost.compute_seconds}
    part = {"matmul": offload.weights, "attention": offload.kv}.get(op_cost.op.kind, 0.0)
    rate = placed.host.peaks.get("fp16") or max(placed.host.peaks.values())
    on_host = np.maximum(part * cost.ops / rate, part * cost.bytes / offload.tier.bandwidth)
    on_device = {"memory": cost.memory_seconds, "compute": cost.compute_seconds}
    return {name: value * (1 - part) for name, value in on_device.items()} | {"host": on_host}


def _op_seconds(op_cost: OpCost, times: Mapping[str, Number], placed: PlacedOffload) -> Number:
    """Seconds of one operation: fetching overlaps with computing, host and device take turns."""
    if placed.host is None:
        return np.maximum(times["link"], op_cost.cost.seconds)
    part = {"matmul": placed.offload.weights, "attention": placed.offload.kv}.get(op_cost.op.kind, 0.0)
    return op_cost.cost.seconds * (1 - part) + times["host"]
