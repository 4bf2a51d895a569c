"""What a pass costs: OPs, bytes by class and time of every operation, on one device of given rates."""

from dataclasses import dataclass, fields

import numpy as np

from foretell.roofline.hardware import Curve, Hardware
from foretell.roofline.linear_cost import Extents, Number
from foretell.roofline.op_graph import Network, Op
from foretell.roofline.workload import Phase, Setting, extents


@dataclass(frozen=True)
class Rates:
    """Hardware and formats reduced to numbers; each a scalar or an array [settings, 1].

    weight, activation, kv: bytes per element. matmul, attend, vector: OPs/s. bandwidth, link: bytes/s. overhead:
    seconds per operation, start: per pass. curve, attend_curve: measured rates of matrix multiplications and of
    attention, in place of their peaks.
    """

    weight: Number
    activation: Number
    kv: Number
    matmul: Number
    attend: Number
    vector: Number
    bandwidth: Number
    link: Number
    devices: Number
    overhead: float = 0.0
    start: float = 0.0
    curve: Curve = ()
    attend_curve: Curve = ()

    def rate(self, kind: str, rows: Number) -> Number:
        """OPs/s of an operation of this kind over so many rows."""
        peak, curve = {"matmul": (self.matmul, self.curve), "attend": (self.attend, self.attend_curve)}.get(
            kind, (self.vector, ())
        )
        if not curve:
            return peak
        at, rate = zip(*curve, strict=True)
        return np.asarray(np.interp(np.asarray(rows, dtype=np.float64), at, rate), dtype=np.float64)


def rates(setting: Setting, hardware: Hardware) -> Rates:
    """Rates of a device for the formats of a setting.

    Raises:
        ValueError: several devices with no known link between them, or a format the device cannot multiply.
    """
    if setting.devices > 1 and not hardware.link:
        raise ValueError(
            f"hardware {hardware.name!r} states no link between devices, so {setting.devices} cannot share a model"
        )
    w, a, kv = setting.weights, setting.activations, setting.kv
    return Rates(
        w.bytes, a.bytes, kv.bytes, hardware.peak(w, a), hardware.peak(a, kv), hardware.elementwise,
        hardware.bandwidth, hardware.link, setting.devices, hardware.overhead,
        hardware.start, hardware.rates.get(hardware.format_class(w, a), ()), hardware.attend,
    )  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """OPs and bytes by class of an operation on one device, and the seconds that OPs, bytes and links take.

    seconds: the longer of the two, plus links and overhead. Scalars, or arrays over settings and passes.
    """

    ops: Number = 0.0
    weights: Number = 0.0
    read: Number = 0.0
    write: Number = 0.0
    kv_read: Number = 0.0
    kv_write: Number = 0.0
    wire: Number = 0.0
    compute_seconds: Number = 0.0
    memory_seconds: Number = 0.0
    seconds: Number = 0.0

    @property
    def bytes(self) -> Number:
        """All bytes moved between memory and chip."""
        return self.weights + self.read + self.write + self.kv_read + self.kv_write

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def times(self, factor: float) -> "Cost":
        """The cost of that many such operations."""
        return Cost(*(getattr(self, f.name) * factor for f in fields(Cost)))

    def summed(self, weight: Number) -> "Cost":
        """Sum over passes (the last axis), each as often as `weight` says."""
        return Cost(*(_sum(getattr(self, f.name), weight) for f in fields(Cost)))


def _sum(value: Number, weight: Number) -> Number:
    product = np.asarray(value * weight, dtype=np.float64)
    count = np.shape(weight)[-1] if np.ndim(weight) else 1
    if product.ndim == 0:
        return np.array([float(product)])
    return product.sum(-1) if product.shape[-1] > 1 or count == 1 else product[..., 0]


def price(op: Op, at: Extents, r: Rates, kv_heads: int) -> Cost:
    """Cost of one operation.

    Tensor parallelism divides what `op.split` says; cached heads are copied where there are too few.
    """
    t, kv_cut = r.devices, np.minimum(r.devices, kv_heads)
    cut = {"column": (t, t, 1, t), "row": (t, t, t, 1), "heads": (t, t, t, t), "whole": (1, 1, 1, 1)}[op.split]
    if op.kind in ("reduce", "gather"):
        moved = op.write.at(at) * r.activation * (t - 1) / t * (2 if op.kind == "reduce" else 1)
        seconds = moved / np.where(np.asarray(r.link) > 0, r.link, 1.0)
        return Cost(wire=moved, seconds=seconds)
    kv_parts = kv_cut if op.split in ("column", "heads") else 1
    ops, weights = op.work.at(at) / cut[0], op.weights.at(at) * r.weight / cut[1]
    read, write = op.read.at(at) * r.activation / cut[2], op.write.at(at) * r.activation / cut[3]
    kv_read, kv_write = op.kv_read.at(at) * r.kv / kv_parts, op.kv_write.at(at) * r.kv / kv_parts
    rows = at.outputs if op.work.outputs else at.rows
    compute, memory = ops / r.rate(op.kind, rows), (weights + read + write + kv_read + kv_write) / r.bandwidth
    return Cost(
        ops,
        weights,
        read,
        write,
        kv_read,
        kv_write,
        0.0,
        compute,
        memory,
        np.maximum(compute, memory) + (r.start if op.kind == "lookup" else r.overhead),
    )


@dataclass(frozen=True)
class Line:
    """One operation of a block, its cost in one layer over all passes of the setting, and how many layers have it."""

    block: str
    count: float
    op: Op
    cost: Cost

    @property
    def intensity(self) -> float:
        """OPs per byte."""
        moved = value(self.cost.bytes)
        return value(self.cost.ops) / moved if moved else 0.0

    @property
    def bound(self) -> str:
        """What limits it: compute, memory, or the link between devices."""
        if self.op.kind in ("reduce", "gather"):
            return "link"
        return "compute" if value(self.cost.compute_seconds) > value(self.cost.memory_seconds) else "memory"

    @property
    def attainable(self) -> float:
        """OPs per second it reaches."""
        seconds = value(self.cost.seconds)
        return value(self.cost.ops) / seconds if seconds else 0.0


def value(number: Number) -> float:
    """The number in an array of one element."""
    return float(np.asarray(number).reshape(-1)[0])


def lines(network: Network, phase: Phase, r: Rates) -> list[Line]:
    """Every operation of a network in order, with its cost summed over the passes of one phase."""
    found: list[Line] = []
    for block in network.blocks:
        at = extents(network, block, phase)
        found.extend(
            Line(block.name, block.count, op, price(op, at, r, block.kv_heads).summed(phase.weight)) for op in block.ops
        )
    return found


def total(found: list[Line]) -> Cost:
    """Cost of the whole network."""
    result = Cost()
    for line in found:
        result = result + line.cost.times(line.count)
    return result
