"""Fit of a runtime's figures to published measurements: the rows of published.toml that are marked for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretell.roofline.linear_cost import Array
from foretell.roofline.published import predict_row
from foretell.roofline.published_rows import PublishedRow, published_rows
from foretell.roofline.runtime import Runtime

_BOUNDS = {
    "bandwidth": (0.5, 0.95),
    "peak": (0.3, 1.0),
    "host": (0.5, 1.0),
    "overlap": (0.0, 1.0),
    "convert": (0.0, 20.0),
    "launch": (0.0, 200e-6),
    "op_overhead": (0.0, 30e-6),
    "pass_overhead": (0.0, 5e-3),
    "step_overhead": (0.0, 30e-3),
    "collective_latency": (0.0, 100e-6),
}
"""Smallest and largest plausible value of each figure."""


FITTED: Mapping[str, tuple[str, ...]] = {
    "eager": ("launch", "step_overhead", "overlap", "host"),
    "eager-hub": ("bandwidth", "launch", "step_overhead", "overlap"),
    "compiled": ("bandwidth", "convert", "op_overhead", "collective_latency", "overlap"),
    "graphs": ("bandwidth", "peak", "overlap", "op_overhead", "pass_overhead", "step_overhead"),
    "expanding": ("pass_overhead", "collective_latency"),
}
"""The figures of each runtime of runtimes.toml that its rows determine."""


def rows_to_fit(name: str) -> list[PublishedRow]:
    """The measurements under a runtime that its figures are fitted to."""
    return [row for row in published_rows() if row.fit and row.runtime == name]


def fit_runtime(start: Runtime, figures: Sequence[str]) -> Runtime:
    """The runtime with the named figures fitted to its rows: least squares of the logarithm of the ratio.

    Raises:
        ValueError: an unknown figure, or fewer rows than figures.
    """
    # Half a second of import that only fits need.
    from scipy.optimize import least_squares

    for name in figures:
        if name not in _BOUNDS:
            raise ValueError(f"a runtime has no figure {name!r} to fit; it has {', '.join(_BOUNDS)}")
    rows = rows_to_fit(start.name)
    if len(rows) < len(figures):
        raise ValueError(f"{len(figures)} figures of {start.name!r} cannot be fitted to {len(rows)} measurements")
    low, high = (np.array([_BOUNDS[name][side] for name in figures]) for side in (0, 1))

    def with_figures(point: Array) -> Runtime:
        fitted: dict[str, Any] = dict(zip(figures, (float(x) for x in low + point * (high - low)), strict=True))
        return replace(start, **fitted)

    def misfit(point: Array) -> Array:
        runtime = with_figures(point)
        return np.array([math.log(predict_row(row, runtime) / row.published) for row in rows])

    first = np.clip((np.array([getattr(start, name) for name in figures]) - low) / (high - low), 0.01, 0.99)
    return with_figures(least_squares(misfit, first, bounds=(0, 1), diff_step=1e-3).x)


def refit(runtime: Runtime) -> Runtime:
    """A runtime of runtimes.toml with its figures fitted anew.

    Raises:
        ValueError: nothing of this runtime is fitted.
    """
    if runtime.name not in FITTED:
        raise ValueError(f"nothing of the runtime {runtime.name!r} is fitted; fit one of {', '.join(FITTED)}")
    return fit_runtime(runtime, FITTED[runtime.name])
