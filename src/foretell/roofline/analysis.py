"""The analysis of a workload on a device: every operation, totals, memory, and the largest sizes that fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from foretell.model.config.model import ModelConfig
from foretell.roofline.attention import Fusion
from foretell.roofline.cost import CostBreakdown, DeviceRates, OpCost, device_rates, op_costs, scalar, total_cost
from foretell.roofline.graph_builder import build_graph
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import Number
from foretell.roofline.memory import MemoryUse, largest_fitting, memory_use
from foretell.roofline.model_configs import find_model
from foretell.roofline.op_graph import OpGraph
from foretell.roofline.workload import (
    Phase,
    Workload,
    WorkloadSizes,
    phases,
    throughput_tokens,
    workload_sizes,
)


@dataclass(frozen=True)
class AnalyzedModel:
    """A named model configuration."""

    name: str
    config: ModelConfig

    @staticmethod
    def named(name: str) -> "AnalyzedModel":
        """The model that `find_model` finds.

        Raises:
            ValueError: there is none.
        """
        return AnalyzedModel(*find_model(name))

    def graph(self, fusion: Fusion, is_prefill: bool, square: bool = False) -> OpGraph:
        """Its operation graph under a fusion; `is_prefill`: with latent attention expanded."""
        return _cached_graph(self, fusion, is_prefill and self.config.latent is not None, square)


builtin_model = lru_cache(maxsize=256)(AnalyzedModel.named)
"""`AnalyzedModel.named` for built-in names, which do not change."""


@lru_cache(maxsize=512)
def _cached_graph(model: AnalyzedModel, fusion: Fusion, expand_latent: bool, square: bool) -> OpGraph:
    return build_graph(model.config, model.name, fusion, not expand_latent, square)


@dataclass(frozen=True)
class Analysis:
    """The predicted cost of a workload.

    op_costs: the operations in order, each for one layer and summed over all passes. total: over operations and layers.
    memory: peak per device. largest_batch, longest_context: largest sizes that fit; None: capacity unknown.
    """

    model: AnalyzedModel
    hardware: Hardware
    workload: Workload
    op_costs: tuple[OpCost, ...]
    total: CostBreakdown
    memory: MemoryUse
    largest_batch: int | None
    longest_context: int | None

    @property
    def seconds(self) -> float:
        """Time of the workload."""
        return scalar(self.total.seconds)

    @property
    def tokens(self) -> float:
        """Tokens over the whole batch (`throughput_tokens`)."""
        return scalar(throughput_tokens(self.workload.stage, workload_sizes(self.workload)))

    @property
    def fits(self) -> bool | None:
        """Whether it fits in memory; None: capacity unknown."""
        capacity = self.hardware.capacity
        return None if capacity is None else scalar(self.memory.total) <= capacity


def check_devices(model: AnalyzedModel, workload: Workload) -> None:
    """Check the degree of tensor parallelism.

    Raises:
        ValueError: the number of devices does not divide the attention heads.
    """
    if model.config.heads % workload.devices:
        raise ValueError(
            f"{workload.devices} devices cannot share the {model.config.heads} heads of {model.name} evenly"
        )


def phase_graphs(
    model: AnalyzedModel, workload: Workload, sizes: WorkloadSizes | None = None
) -> list[tuple[OpGraph, Phase]]:
    """The phases of a workload, each with the graph that it runs; `sizes`: in place of the workload's own."""
    return [
        (model.graph(workload.fusion, phase.is_prefill, workload.square), phase)
        for phase in phases(workload.stage, sizes or workload_sizes(workload))
    ]


def analyse(model: AnalyzedModel, hardware: Hardware, workload: Workload) -> Analysis:
    """Predict the cost of a workload on a device.

    Raises:
        ValueError: devices that do not divide the heads, no link between them, or a format the hardware cannot
            multiply.
    """
    check_devices(model, workload)
    rates = device_rates(workload, hardware)
    costs: list[OpCost] = []
    for graph, phase in phase_graphs(model, workload):
        costs = merge_costs(costs, op_costs(graph, phase, rates))
    if workload.devices == 1:
        costs = [c for c in costs if not c.op.is_collective]
    batch, context = largest_sizes(model, hardware, workload)
    memory = workload_memory(model, workload, rates)
    return Analysis(model, hardware, workload, tuple(costs), total_cost(costs), memory, batch, context)


def largest_sizes(
    model: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    resident: Callable[[MemoryUse], Number] = lambda memory: memory.total,
) -> tuple[int | None, int | None]:
    """The largest batch and the longest context of which the `resident` bytes fit; None: capacity unknown."""
    rates = device_rates(workload, hardware)
    batch, context = (_largest_fitting(n, model, workload, rates, hardware, resident) for n in ("batch", "context"))
    return batch, context


def workload_memory(model: AnalyzedModel, workload: Workload, rates: DeviceRates) -> MemoryUse:
    """Peak memory of a workload."""
    return memory_use(phase_graphs(model, workload), rates)


def predict_seconds(model: AnalyzedModel, hardware: Hardware, workload: Workload) -> float:
    """Time of a workload alone, without the rest of its analysis."""
    rates = device_rates(workload, hardware)
    return sum(scalar(total_cost(op_costs(g, p, rates)).seconds) for g, p in phase_graphs(model, workload))


def merge_costs(first: list[OpCost], second: list[OpCost]) -> list[OpCost]:
    """The costs of two phases added by operation; an operation of the second alone goes to the end of its group."""
    merged = list(first)
    for new in second:
        at = next((i for i, m in enumerate(merged) if (m.group, m.op.name) == (new.group, new.op.name)), None)
        if at is None:
            same_group = [i for i, m in enumerate(merged) if m.group == new.group]
            merged.insert(same_group[-1] + 1 if same_group else len(merged), new)
        else:
            merged[at] = replace(merged[at], cost=merged[at].cost + new.cost)
    return merged


def _largest_fitting(
    name: str,
    model: AnalyzedModel,
    workload: Workload,
    rates: DeviceRates,
    hardware: Hardware,
    resident: Callable[[MemoryUse], Number],
) -> int | None:
    """Largest `batch` or `context` that fits; None: capacity unknown."""
    capacity = hardware.capacity
    if capacity is None:
        return None

    def fits(size: int) -> bool:
        resized = replace(workload, batch=size) if name == "batch" else replace(workload, context=size)
        if resized.stage == "chat":
            resized = replace(resized, generate=1) if name == "context" else resized
        elif resized.stage == "chunked":
            # At most 64 chunks: more would not change the peak but take long to evaluate.
            resized = replace(resized, chunk=max(resized.chunk, resized.context // 64))
        return scalar(resident(workload_memory(model, resized, rates))) <= capacity

    return largest_fitting(name, fits)
