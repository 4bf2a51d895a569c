"""Weights and cache kept outside the device: streamed to it over the host link, or computed with beside that memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.roofline.analysis import Analysis
from foretell.roofline.cost import Line, value
from foretell.roofline.hardware import Hardware, Tier
from foretell.roofline.names import look_up


@dataclass(frozen=True)
class Offload:
    """Which part of the weights and of the cache lies in a tier; `compute` on the `device` or on the `host` beside that
    memory.

    Raises:
        ValueError: a part outside 0 to 1.
    """

    tier: Tier
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
class Offloaded:
    """Time of the setting, bytes left on the device, bytes fetched from the tier, and what bounds the time."""

    seconds: float
    resident: float
    fetched: float
    bound: str


def offloaded(analysis: Analysis, offload: Offload, devices: Mapping[str, Hardware]) -> Offloaded:
    """The analysis with part of its data in a tier.

    Streaming overlaps fetching, memory and compute, as FlexGen's cost model does: an operation takes the longest of the
    three (arXiv 2303.06865). On the host, the device and the host each do their part, one after the other, and only
    states cross the link. Raises:
        ValueError: the device states no host link, or no processor is known beside the tier.
    """
    device = analysis.hardware
    if offload.compute == "device" and not device.host:
        raise ValueError(f"hardware {device.name!r} states no link to host memory; compute on the host instead")
    if offload.compute == "host" and offload.tier.compute is None:
        raise ValueError(f"no processor is known beside {offload.tier.name!r}; compute on the device instead")
    host = (
        look_up(devices, offload.tier.compute, "hardware")
        if offload.tier.compute and offload.compute == "host"
        else None
    )
    parts = {"compute": 0.0, "memory": 0.0, "link": 0.0, "host": 0.0}
    seconds = fetched = 0.0
    for line in analysis.lines:
        took, away, why = _host(line, offload, host) if host else _stream(line, offload, device)
        seconds, fetched = seconds + took * line.count, fetched + away * line.count
        parts[why] += took * line.count
    m = analysis.memory
    resident = value(m.weights) * (1 - offload.weights) + value(m.kv) * (1 - offload.kv) + value(m.activations)
    return Offloaded(seconds, resident, fetched, max(parts, key=lambda k: parts[k]))


def _away(line: Line, offload: Offload) -> float:
    return value(line.cost.weights) * offload.weights + value(line.cost.kv_read + line.cost.kv_write) * offload.kv


def _stream(line: Line, offload: Offload, device: Hardware) -> tuple[float, float, str]:
    away = _away(line, offload)
    link = min(device.host, offload.tier.bandwidth)
    times = {
        "link": away / link,
        "memory": value(line.cost.memory_seconds),
        "compute": value(line.cost.compute_seconds),
    }
    why = max(times, key=lambda k: times[k])
    return max(times[why], value(line.cost.seconds)), away, why


def _host(line: Line, offload: Offload, host: Hardware) -> tuple[float, float, str]:
    away = _away(line, offload)
    moved = value(line.cost.bytes)
    part = {"matmul": offload.weights, "attend": offload.kv}.get(line.op.kind, 0.0)
    here = value(line.cost.seconds) * (1 - part)
    rate = host.peaks.get("fp16") or max(host.peaks.values())
    there = max(part * value(line.cost.ops) / rate, part * moved / offload.tier.bandwidth)
    return here + there, away, "host" if there > here else line.bound if line.bound != "link" else "memory"
