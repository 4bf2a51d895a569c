"""OPs, bytes and time of every operation of a pass, on one device: time = max(OPs / peak, bytes / bandwidth).

A runtime (`foretell.roofline.runtime`) lowers the rates, adds part of the shorter of the two times, and fixed times.
"""

from dataclasses import dataclass, fields

import numpy as np

from foretell.roofline.formats import is_converted
from foretell.roofline.hardware import Curve, Hardware
from foretell.roofline.linear_cost import Extents, Number
from foretell.roofline.op_graph import Op, OpGraph
from foretell.roofline.runtime import DATASHEET, Runtime
from foretell.roofline.workload import Phase, Workload, phase_extents


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a device for given number formats; each a scalar or an array [workloads, 1].

    weight, head, activation, kv: bytes per element; head: of embedding and LM head. matmul, attention, elementwise,
    head_matmul: OPs/s. bandwidth, link: bytes/s. runtime: the fixed times and the overlap. convert, head_convert: OPs
    to widen a weight. matmul_curve, attention_curve: measured rates, which replace the others where given.
    """

    weight: Number
    head: Number
    activation: Number
    kv: Number
    matmul: Number
    attention: Number
    elementwise: Number
    bandwidth: Number
    link: Number
    devices: Number
    runtime: Runtime = DATASHEET
    convert: float = 0.0
    head_convert: float = 0.0
    head_matmul: Number = 0.0
    matmul_curve: Curve = ()
    attention_curve: Curve = ()

    def rate(self, op: Op, rows: Number) -> Number:
        """OPs/s of an operation over `rows` rows; of attention: over as many queries per key."""
        if op.is_vocabulary and op.kind == "matmul" and self.head != self.weight:
            return self.head_matmul
        measured = {"matmul": (self.matmul, self.matmul_curve), "attention": (self.attention, self.attention_curve)}
        peak, curve = measured.get(op.kind, (self.elementwise, ()))
        if not curve:
            return peak
        measured_rows, rate = zip(*curve, strict=True)
        return np.asarray(np.interp(np.asarray(rows, dtype=np.float64), measured_rows, rate), dtype=np.float64)


def device_rates(workload: Workload, hardware: Hardware) -> DeviceRates:
    """Rates of a device for the number formats of a workload.

    Raises:
        ValueError: several devices with no known link between them, or a format the device cannot multiply.
    """
    if workload.devices > 1 and not hardware.link_bandwidth:
        raise ValueError(
            f"hardware {hardware.name!r} states no link between devices, so {workload.devices} cannot share a model"
        )
    w, a, kv, runtime = workload.weights, workload.activations, workload.kv, hardware.runtime
    head = workload.head_weights
    return DeviceRates(
        w.bytes, head.bytes, a.bytes, kv.bytes, hardware.peak(w, a) * runtime.peak, hardware.peak(a, kv) * runtime.peak,
        hardware.elementwise_rate, hardware.bandwidth * runtime.bandwidth, hardware.link_bandwidth, workload.devices,
        runtime, runtime.convert if is_converted(w, a) else 0.0, runtime.convert if is_converted(head, a) else 0.0,
        hardware.peak(head, a) * runtime.peak,
        hardware.matmul_rates.get(hardware.format_class(w, a), ()), hardware.attention_rates,
    )  # fmt: skip


@dataclass(frozen=True)
class CostBreakdown:
    """OPs, bytes by class, and seconds of operations on one device; scalars, or arrays [workloads, passes].

    link: bytes sent to other devices. seconds: from compute and memory time, plus link time and the runtime's overhead.
    """

    ops: Number = 0.0
    weights: Number = 0.0
    read: Number = 0.0
    write: Number = 0.0
    kv_read: Number = 0.0
    kv_write: Number = 0.0
    link: Number = 0.0
    compute_seconds: Number = 0.0
    memory_seconds: Number = 0.0
    seconds: Number = 0.0

    @property
    def bytes(self) -> Number:
        """All bytes moved between memory and chip."""
        return self.weights + self.read + self.write + self.kv_read + self.kv_write

    def __add__(self, other: "CostBreakdown") -> "CostBreakdown":
        return CostBreakdown(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(CostBreakdown)))

    def scaled(self, factor: float) -> "CostBreakdown":
        """The cost of that many such operations."""
        return CostBreakdown(*(getattr(self, f.name) * factor for f in fields(CostBreakdown)))

    def sum_passes(self, repeats: Number) -> "CostBreakdown":
        """Sum over passes (the last axis), each counted `repeats` times."""
        return CostBreakdown(*(_sum_passes(getattr(self, f.name), repeats) for f in fields(CostBreakdown)))


def _sum_passes(value: Number, repeats: Number) -> Number:
    product = np.asarray(value * repeats, dtype=np.float64)
    count = np.shape(repeats)[-1] if np.ndim(repeats) else 1
    if product.ndim == 0:
        return np.array([float(product)])
    return product.sum(-1) if product.shape[-1] > 1 or count == 1 else product[..., 0]


def op_cost(op: Op, extents: Extents, rates: DeviceRates, kv_heads: int) -> CostBreakdown:
    """Cost of one operation on one device.

    Tensor parallelism divides it by `op.split`. Key and value heads are replicated where there are fewer than devices.
    """
    t = rates.devices
    parts = {"column": (t, t, 1, t), "row": (t, t, t, 1), "heads": (t, t, t, t), "replicated": (1, 1, 1, 1)}
    ops_parts, weight_parts, read_parts, write_parts = parts[op.split]
    if op.is_collective:
        # A ring: an all-reduce is a reduce-scatter and an all-gather.
        moved = op.write.evaluate(extents) * rates.activation * (t - 1) / t * (2 if op.kind == "all_reduce" else 1)
        latency = np.where(np.asarray(t) > 1, rates.runtime.collective_latency, 0.0)
        seconds = moved / np.where(np.asarray(rates.link) > 0, rates.link, 1.0) + latency
        return CostBreakdown(link=moved, seconds=seconds)
    kv_parts = np.minimum(t, kv_heads) if op.split in ("column", "heads") else 1
    ops = op.work.evaluate(extents) / ops_parts
    weight_bytes, convert = (rates.head, rates.head_convert) if op.is_vocabulary else (rates.weight, rates.convert)
    weights = op.weights.evaluate(extents) * weight_bytes / weight_parts
    read = op.read.evaluate(extents) * rates.activation / read_parts
    write = op.write.evaluate(extents) * rates.activation / write_parts
    kv_read = op.kv_read.evaluate(extents) * rates.kv / kv_parts
    kv_write = op.kv_write.evaluate(extents) * rates.kv / kv_parts
    rows = extents.logit_rows if op.work.logit_rows else extents.rows
    if op.kind == "attention":
        rows = extents.pairs / np.maximum(extents.kv_positions, 1.0)
    runtime = rates.runtime
    compute, memory = ops / rates.rate(op, rows), (weights + read + write + kv_read + kv_write) / rates.bandwidth
    if op.kind == "matmul" and convert:
        compute = compute + weights / weight_bytes * convert / rates.elementwise
    exposed = np.maximum(compute, memory) + (1 - runtime.overlap) * np.minimum(compute, memory)
    if op.kind == "attention" and runtime.cache_read:
        exposed = compute + (kv_read + kv_write) * runtime.cache_read
    if op.is_vocabulary and op.kind == "matmul":
        exposed = exposed + op.write.evaluate(extents) / write_parts * runtime.logit_time
    # Every pass has one embedding lookup.
    overhead = runtime.pass_overhead if op.kind == "lookup" else runtime.op_overhead
    seconds = np.maximum(exposed, runtime.launch) + overhead
    return CostBreakdown(ops, weights, read, write, kv_read, kv_write, 0.0, compute, memory, seconds)


@dataclass(frozen=True)
class OpCost:
    """An operation with its cost in one layer, summed over the passes of a workload; `count` layers have it."""

    group: str
    count: float
    op: Op
    cost: CostBreakdown

    @property
    def intensity(self) -> float:
        """OPs per byte."""
        moved = scalar(self.cost.bytes)
        return scalar(self.cost.ops) / moved if moved else 0.0

    @property
    def bound(self) -> str:
        """What limits its time: `compute`, `memory`, or the `link` between devices."""
        if self.op.is_collective:
            return "link"
        return "compute" if scalar(self.cost.compute_seconds) > scalar(self.cost.memory_seconds) else "memory"

    @property
    def attainable(self) -> float:
        """OPs per second that it reaches."""
        seconds = scalar(self.cost.seconds)
        return scalar(self.cost.ops) / seconds if seconds else 0.0


def scalar(number: Number) -> float:
    """The number in an array of one element."""
    return float(np.asarray(number).reshape(-1)[0])


def op_costs(graph: OpGraph, phase: Phase, rates: DeviceRates) -> list[OpCost]:
    """Every operation of a graph in order, with its cost summed over the passes of one phase."""
    costs: list[OpCost] = []
    for group in graph.groups:
        extents = phase_extents(graph, group, phase)
        for op in group.ops:
            cost = op_cost(op, extents, rates, group.kv_heads).sum_passes(phase.repeats)
            costs.append(OpCost(group.name, group.count, op, cost))
    return costs


def total_cost(costs: list[OpCost]) -> CostBreakdown:
    """The sum over operations and layers."""
    result = CostBreakdown()
    for each in costs:
        result = result + each.cost.scaled(each.count)
    return result
