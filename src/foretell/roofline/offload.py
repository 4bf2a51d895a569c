"""Offloading of weights and KV cache: streamed to the device over the host link, or computed on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.roofline.analysis import Analysis
from foretell.roofline.cost import OpCost, scalar
from foretell.roofline.hardware import Hardware, MemoryTier
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
class OffloadResult:
    """Time of the workload, bytes left on the device, bytes fetched from the tier, and what bounds the time."""

    seconds: float
    resident: float
    fetched: float
    bound: str


def apply_offload(analysis: Analysis, offload: Offload, hardware: Mapping[str, Hardware]) -> OffloadResult:
    """The predicted cost of an analysed workload under offloading.

    On the device, an operation takes the longest of fetching, memory and compute time, which overlap (FlexGen, arXiv
    2303.06865). On the host, device and host compute their parts one after the other.

    Raises:
        ValueError: the device states no host link, or no processor is known beside the tier.
    """
    device = analysis.hardware
    if offload.compute == "device" and not device.host_bandwidth:
        raise ValueError(f"hardware {device.name!r} states no link to host memory; compute on the host instead")
    if offload.compute == "host" and offload.tier.compute is None:
        raise ValueError(f"no processor is known beside {offload.tier.name!r}; compute on the device instead")
    host = None
    if offload.compute == "host" and offload.tier.compute:
        host = look_up(hardware, offload.tier.compute, "hardware")
    seconds_by_bound = {"compute": 0.0, "memory": 0.0, "link": 0.0, "host": 0.0}
    seconds = fetched = 0.0
    for each in analysis.op_costs:
        took, moved, bound = _compute_on_host(each, offload, host) if host else _stream(each, offload, device)
        seconds, fetched = seconds + took * each.count, fetched + moved * each.count
        seconds_by_bound[bound] += took * each.count
    m = analysis.memory
    resident = scalar(m.weights) * (1 - offload.weights) + scalar(m.kv) * (1 - offload.kv) + scalar(m.activations)
    return OffloadResult(seconds, resident, fetched, max(seconds_by_bound, key=lambda k: seconds_by_bound[k]))


def share_outside(weight_bytes: float, hardware: Hardware) -> float:
    """Part of the weights that does not fit beside the cache and the activations on a device, 0 to 1.

    Raises:
        ValueError: the capacity of the device is not stated.
    """
    if hardware.capacity is None:
        raise ValueError(f"hardware {hardware.name!r} states no capacity, so what fits cannot be told")
    return max(0.0, 1 - CAPACITY_FOR_WEIGHTS * hardware.capacity / weight_bytes)


def _offloaded_bytes(op_cost: OpCost, offload: Offload) -> float:
    cost = op_cost.cost
    return scalar(cost.weights) * offload.weights + scalar(cost.kv_read + cost.kv_write) * offload.kv


def _stream(op_cost: OpCost, offload: Offload, device: Hardware) -> tuple[float, float, str]:
    """Seconds, bytes fetched, and what bounds them."""
    fetched = _offloaded_bytes(op_cost, offload)
    link = min(device.host_bandwidth * device.runtime.host, offload.tier.bandwidth)
    times = {
        "link": fetched / link,
        "memory": scalar(op_cost.cost.memory_seconds),
        "compute": scalar(op_cost.cost.compute_seconds),
    }
    bound = max(times, key=lambda k: times[k])
    return max(times[bound], scalar(op_cost.cost.seconds)), fetched, bound


def _compute_on_host(op_cost: OpCost, offload: Offload, host: Hardware) -> tuple[float, float, str]:
    """Seconds, bytes fetched, and what bounds them."""
    fetched = _offloaded_bytes(op_cost, offload)
    moved = scalar(op_cost.cost.bytes)
    part = {"matmul": offload.weights, "attention": offload.kv}.get(op_cost.op.kind, 0.0)
    device_seconds = scalar(op_cost.cost.seconds) * (1 - part)
    rate = host.peaks.get("fp16") or max(host.peaks.values())
    host_seconds = max(part * scalar(op_cost.cost.ops) / rate, part * moved / offload.tier.bandwidth)
    device_bound = "memory" if op_cost.bound == "link" else op_cost.bound
    bound = "host" if host_seconds > device_seconds else device_bound
    return device_seconds + host_seconds, fetched, bound
