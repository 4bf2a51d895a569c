"""Predicted costs of many workloads at once: the product of several ranges, evaluated as arrays."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.roofline.analysis import AnalyzedModel, check_devices, merge_costs, phase_graphs
from foretell.roofline.cost import OpCost, device_rates, op_costs, total_cost
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware, with_overrides
from foretell.roofline.linear_cost import Array, Number
from foretell.roofline.memory import memory_use
from foretell.roofline.names import look_up
from foretell.roofline.offload import PlacedOffload, offloaded_seconds, resident_memory
from foretell.roofline.workload import LIMITS, Workload, WorkloadSizes, throughput_tokens
from foretell.utils.assignments import split_assignment

LENGTH_AXES = ("batch", "context", "tokens", "chunk", "generate")
FORMAT_AXES = ("weights", "activations", "kv")
RATE_AXES = ("bandwidth", "peak")
AXES = (*LENGTH_AXES, *FORMAT_AXES, *RATE_AXES, "devices")
MAX_WORKLOADS = 200_000
"""Most workloads of one sweep."""
MAX_PASSES_AT_ONCE = 1_000_000
"""Passes evaluated at once; it bounds the memory of a sweep."""

Axis = tuple[float, ...] | tuple[str, ...]


def parse_axis(text: str) -> tuple[str, Axis]:
    """Parse `batch=1:256`, `batch=1:256:5` (step), `context=128:65536*2` (factor), or `weights=16,8,4`.

    bandwidth is in GB/s, peak in 1e12 OPs/s.

    Raises:
        ValueError: an unknown axis, no values, or values out of range.
    """
    name, values = split_assignment(text, "--sweep", "batch=1:256 or weights=16,8,4")
    name = look_up({a: a for a in AXES}, name, "sweep axis")
    if name in FORMAT_AXES:
        formats = tuple(parse_format(v).name for v in values.split(",") if v.strip())
        if not formats:
            raise ValueError(f"the sweep {text!r} is empty")
        return name, formats
    numbers = _parse_numbers(values, text)
    if name in RATE_AXES:
        if min(numbers) <= 0:
            raise ValueError(f"{name} must be positive, found {min(numbers):g} in the sweep {text!r}")
        return name, numbers
    for number in numbers:
        least = 0 if name == "context" else 1
        if number != int(number) or not least <= number <= LIMITS[name]:
            raise ValueError(
                f"{name} must be a whole number between {least} and {LIMITS[name]}, found {number:g} in {text!r}"
            )
    return name, numbers


def _parse_numbers(values: str, text: str) -> tuple[float, ...]:
    match = re.fullmatch(r"\s*([-+.\deE]+):([-+.\deE]+)(?:([:*])([-+.\deE]+))?\s*", values)
    try:
        if not match:
            numbers = tuple(float(v) for v in values.split(",") if v.strip())
        else:
            low, high, step = float(match[1]), float(match[2]), float(match[4] or 1)
            if match[3] == "*":
                numbers = _geometric(low, high, step, text)
            else:
                if step <= 0:
                    raise ValueError(f"the sweep {text!r} never ends: its step must be above 0, found {step:g}")
                count = (high - low) / step
                if not count < MAX_WORKLOADS:
                    raise ValueError(f"the sweep {text!r} is too large: at most {MAX_WORKLOADS} settings")
                numbers = (
                    tuple(float(v) for v in low + step * np.arange(np.floor(count + 1e-9) + 1)) if count >= 0 else ()
                )
    except ValueError as error:
        raise (
            error if "sweep" in str(error) else ValueError(f"the sweep {text!r} has a value that is no number")
        ) from None
    if not numbers:
        raise ValueError(f"the sweep {text!r} is empty")
    if not all(np.isfinite(numbers)):
        raise ValueError(f"the sweep {text!r} has a value that is no number")
    return numbers


def _geometric(low: float, high: float, factor: float, text: str) -> tuple[float, ...]:
    if factor <= 1 or low <= 0:
        raise ValueError(f"the sweep {text!r} never ends: start above 0 and use a factor above 1")
    count = math.log(high / low) / math.log(factor) if high >= low else -1.0
    if not count < MAX_WORKLOADS:
        raise ValueError(f"the sweep {text!r} is too large: at most {MAX_WORKLOADS} settings")
    return tuple(low * factor**i for i in range(math.floor(count + 1e-9) + 1))


@dataclass(frozen=True)
class SweepResult:
    """Predicted costs of the product of `axes` (the last axis varies fastest); arrays [workloads]."""

    axes: Mapping[str, Axis]
    seconds: Array
    ops: Array
    bytes: Array
    memory: Array
    tokens: Array

    def points(self) -> Sequence[tuple[float | str, ...]]:
        """The axis values of every workload."""
        return list(itertools.product(*self.axes.values()))


def sweep(
    model: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    axes: Mapping[str, Axis],
    offload: PlacedOffload | None = None,
) -> SweepResult:
    """Predict the costs of a workload with the axes varied; `offload`: of weights and cache.

    Raises:
        ValueError: no axis, more than MAX_WORKLOADS workloads, or an impossible workload.
    """
    size = int(np.prod([len(v) for v in axes.values()], dtype=np.float64)) if axes else 0
    if not 1 <= size <= MAX_WORKLOADS:
        what = "is empty" if size < 1 else f"has {size} settings, at most {MAX_WORKLOADS} are allowed"
        raise ValueError(f"the sweep {what}")
    results = {name: np.empty(size) for name in ("seconds", "ops", "bytes", "memory", "tokens")}
    scalar_axes = [n for n in axes if n in (*FORMAT_AXES, *RATE_AXES, "devices")]
    grid = np.indices([len(v) for v in axes.values()]).reshape(len(axes), -1)
    row = {name: i for i, name in enumerate(axes)}
    for combination in itertools.product(*(range(len(axes[n])) for n in scalar_axes)):
        mask = np.ones(size, dtype=bool)
        for name, index in zip(scalar_axes, combination, strict=True):
            mask &= grid[row[name]] == index
        values_chosen = {n: axes[n][i] for n, i in zip(scalar_axes, combination, strict=True)}
        device, fixed = _with_fixed_axes(hardware, workload, values_chosen)
        check_devices(model, fixed)
        selected = np.flatnonzero(mask)
        lengths = {n: np.asarray(axes[n], dtype=np.float64)[grid[row[n]][selected]] for n in LENGTH_AXES if n in axes}
        for name, values in _evaluate(model, device, fixed, lengths, len(selected), offload).items():
            results[name][selected] = values
    return SweepResult(axes, **results)


def _with_fixed_axes(
    hardware: Hardware, workload: Workload, chosen: Mapping[str, float | str]
) -> tuple[Hardware, Workload]:
    rate = {n: float(v) for n, v in chosen.items() if n in RATE_AXES}
    device = with_overrides(
        hardware,
        rate["bandwidth"] * 1e9 if "bandwidth" in rate else None,
        rate["peak"] * 1e12 if "peak" in rate else None,
    )
    w, a, kv = (parse_format(str(chosen[n])) if n in chosen else getattr(workload, n) for n in FORMAT_AXES)
    return device, replace(
        workload, weights=w, activations=a, kv=kv, devices=int(chosen.get("devices", workload.devices))
    )


def _evaluate(
    model: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    lengths: Mapping[str, Array],
    count: int,
    offload: PlacedOffload | None,
) -> dict[str, Array]:
    """Costs of workloads that differ in lengths alone, a slice at a time."""
    sizes = {n: lengths.get(n, np.full(count, float(getattr(workload, n)))) for n in LENGTH_AXES}
    passes = sizes["generate"].max() if workload.stage == "chat" else 1.0
    if workload.stage == "chunked":
        passes = float(np.ceil(sizes["context"] / sizes["chunk"]).max())
    step = max(1, int(MAX_PASSES_AT_ONCE / passes))
    parts: dict[str, list[Array]] = {n: [] for n in ("seconds", "ops", "bytes", "memory", "tokens")}
    rates = device_rates(workload, hardware)
    for start in range(0, count, step):
        part = WorkloadSizes(*(sizes[n][start : start + step] for n in LENGTH_AXES))
        shape = part.batch.shape
        graphs = phase_graphs(model, workload, part)
        costs: list[OpCost] = []
        for graph, phase in graphs:
            costs = merge_costs(costs, op_costs(graph, phase, rates))
        if workload.devices == 1:
            costs = [c for c in costs if not c.op.is_collective]
        cost, memory = total_cost(costs), memory_use(graphs, rates)
        figures: dict[str, Number] = {
            "seconds": cost.seconds if offload is None else offloaded_seconds(costs, offload),
            "ops": cost.ops,
            "bytes": cost.bytes,
            "memory": memory.total if offload is None else resident_memory(memory, offload.offload).total,
            "tokens": throughput_tokens(workload.stage, part),
        }
        for name, figure in figures.items():
            parts[name].append(np.broadcast_to(np.asarray(figure, dtype=np.float64), shape))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
