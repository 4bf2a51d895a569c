"""Curves and the roofline as data that a page draws: points with their text, grids and marks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.roofline.analysis import Analysis
from foretell.roofline.cost import OpCost, device_rates, scalar
from foretell.roofline.report import format_number

Point = tuple[float, float, bool]
"""x, y, and whether it fits in memory."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart; `other`: of the compared setting or without drafts. band: (x, low, high)."""

    points: Sequence[Point]
    label: str = ""
    other: bool = False
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Axes:
    """What a chart says beside its curves.

    here: a point that is marked. even: a value that is drawn dashed. logarithmic: of the y axis; the x axis always is.
    dots: every point is marked.
    """

    x: str
    y: str
    text: Callable[[float], str]
    here: tuple[float, float] | None = None
    even: float | None = None
    logarithmic: bool = False
    dots: bool = False
    marks: Sequence[float] = field(default=())


def chart(curves: Sequence[Curve], axes: Axes) -> dict[str, Any]:
    """Curves over a logarithmic x axis."""
    values = [y for c in curves for _, y, _ in c.points] + [high for c in curves for *_, high in c.band]
    values += [] if axes.even is None else [axes.even]
    grid = _decades(values) if axes.logarithmic else _round_steps(values)
    xs = [x for c in curves for x, *_ in c.points]
    return {
        "series": [
            {
                "label": c.label,
                "other": c.other,
                "points": [[x, y, fits, _readout(x, axes.text(y), fits)] for x, y, fits in c.points],
                "band": [list(edge) for edge in c.band],
            }
            for c in curves
        ],
        "grid": [[value, axes.text(value)] for value in grid],
        "ticks": _powers_of_two(min(xs), max(xs)),
        "x": axes.x, "y": axes.y, "here": axes.here, "even": axes.even, "logarithmic": axes.logarithmic,
        "dots": axes.dots,
    }  # fmt: skip


def _readout(x: float, text: str, fits: bool) -> str:
    return f"{float(f'{x:.3g}'):,g}: {text}{'' if fits else ' (does not fit)'}"


def _round_steps(values: Sequence[float]) -> list[float]:
    """Five values from 0 to a round number above all."""
    most = max(*values, 1e-12) * 1.02
    unit = 10.0 ** math.floor(math.log10(most))
    top = next(k * unit for k in (1, 2, 4, 6, 8, 10) if k * unit >= most)
    return [top * i / 4 for i in range(5)]


def _decades(values: Sequence[float]) -> list[float]:
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    return [10.0**e for e in range(low, high + 1)]


def _powers_of_two(low: float, high: float) -> list[list[Any]]:
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((math.log2(high) - math.log2(low)) / 6))
    return [[2.0**e, f"{2**e:g}" if e < 10 else f"{2 ** (e - 10)}k"] for e in range(first, last + 1, step)]


def roofline(analyses: Sequence[Analysis], key: Callable[[OpCost], str]) -> dict[str, Any]:
    """The roof of every analysis and a dot for each of its operations, both axes logarithmic; the first one is shown,
    the others are compared with it.
    """
    costs = [(c, i > 0) for i, a in enumerate(analyses) for c in a.op_costs]
    dots = [_dot(c, key(c), other) for c, other in costs if scalar(c.cost.ops) > 0 and scalar(c.cost.bytes) > 0]
    roofs = [_roof(a) for a in analyses]
    lowest = min(min(d["x"] for d in dots), 0.5)
    highest = max(*(d["x"] for d in dots), *(12 * peak / bandwidth for bandwidth, peak in roofs))
    x0, x1 = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    left = min(bandwidth * 10.0**x0 for bandwidth, _ in roofs)
    y0 = math.floor(math.log10(min(left, *(d["y"] for d in dots))))
    y1 = math.log10(max(peak for _, peak in roofs)) + 0.5
    return {
        "x": [x0, x1], "y": [y0, y1], "roofs": [list(r) for r in roofs], "dots": dots,
        "xticks": [[e, _tick(e)] for e in range(x0, x1 + 1)],
        "yticks": [[e, _tick(e)] for e in range(y0, math.floor(y1) + 1)],
    }  # fmt: skip


def _dot(c: OpCost, key: str, other: bool) -> dict[str, Any]:
    title = f"{c.op.name}: {c.intensity:.3g} OPs/byte, {format_number(c.attainable, 'OP/s')}"
    return {
        "key": key, "name": c.op.name, "x": c.intensity, "y": c.attainable, "bound": c.bound, "other": other,
        "title": title,
    }  # fmt: skip


def _roof(a: Analysis) -> tuple[float, float]:
    """Bandwidth and peak under the runtime."""
    rates = device_rates(a.workload, a.hardware)
    return scalar(rates.bandwidth), max(scalar(rates.matmul), scalar(rates.attention))


def _tick(exponent: int) -> str:
    return f"{10.0**exponent:g}" if exponent < 0 else format_number(10.0**exponent).replace(" ", "")
