"""Published measurements, each beside its prediction, with the errors by group."""

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from foretell.roofline.analysis import AnalyzedModel, analyse, predict_seconds
from foretell.roofline.cost import scalar
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware, known_hardware, memory_tier
from foretell.roofline.method_profiles import find_method
from foretell.roofline.model_configs import find_model
from foretell.roofline.offload import Offload, apply_offload, share_outside
from foretell.roofline.plan import cost_of_profile
from foretell.roofline.runtime import Runtime, find_runtime
from foretell.roofline.speculation import DraftShape, estimate_method
from foretell.roofline.workload import Workload

Measure = Literal["speedup", "tokens_per_second", "seconds_per_pass", "seconds_per_token"]
DEFAULT_CONTEXT = 500
"""Cached tokens of a measurement that states none: half of a typical answer and its prompt."""


@dataclass(frozen=True)
class PublishedRow:
    """A published measurement; published.toml describes the fields."""

    group: str
    model: str
    hardware: str
    runtime: str
    measure: Measure
    published: float
    source: str
    batch: int = 1
    context: int = DEFAULT_CONTEXT
    tokens: int = 1
    weights: str = "16"
    devices: int = 1
    method: str = ""
    draft: str = ""
    nodes: int = 0
    depth: int = 0
    tau: float = 0.0
    tau_basis: str = ""
    offload: bool = False
    fit: bool = False

    @property
    def workload(self) -> Workload:
        """The workload that was measured."""
        form = parse_format(self.weights)
        return Workload(
            "verify", self.batch, self.context, self.tokens, weights=form, fusion="flash", devices=self.devices
        )

    def predict(self, runtime: Runtime | None = None) -> float:
        """The prediction of the measured figure; `runtime`: in place of the row's own."""
        model = _model(self.model)
        hardware = replace(_hardware()[self.hardware], runtime=runtime or find_runtime(self.runtime))
        if self.measure == "speedup":
            profile, shape = find_method(self.method), DraftShape(self.nodes, self.depth, self.tau)
            drafter = cost_of_profile(profile, model, _model(self.draft) if self.draft else None)
            return estimate_method(profile, drafter, model, hardware, self.workload, shape=shape).speedup
        if self.offload:
            return _offloaded_seconds(model, hardware, self.workload)
        seconds = predict_seconds(model, hardware, self.workload)
        return 1 / seconds if self.measure == "tokens_per_second" else seconds


@cache
def _model(name: str) -> AnalyzedModel:
    return AnalyzedModel(*find_model(name))


@cache
def _hardware() -> Mapping[str, Hardware]:
    return known_hardware()


def _offloaded_seconds(model: AnalyzedModel, hardware: Hardware, workload: Workload) -> float:
    """Time of a pass whose weights come from the host as far as they do not fit."""
    analysis = analyse(model, hardware, workload)
    placement = Offload(memory_tier("ddr"), share_outside(scalar(analysis.memory.weights), hardware), 0.0, "device")
    return apply_offload(analysis, placement, _hardware()).seconds


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("foretell.roofline").joinpath("published.toml").read_text("utf-8"))


def published_groups() -> Mapping[str, str]:
    """The groups of measurements, and what each is about."""
    return {name: str(entry["about"]) for name, entry in _table().items()}


@cache
def published_rows() -> Sequence[PublishedRow]:
    """All measurements in order.

    Raises:
        ValueError: a row with an unknown measure.
    """
    rows = [PublishedRow(name, **raw) for name, entry in _table().items() for raw in entry["rows"]]
    for row in rows:
        if row.measure not in get_args(Measure):
            raise ValueError(f"published.toml: there is no measure {row.measure!r}; use {', '.join(get_args(Measure))}")
    return rows


@dataclass(frozen=True)
class ComparedRow:
    """A measurement and its prediction."""

    row: PublishedRow
    predicted: float

    @property
    def error(self) -> float:
        """Relative to the published figure."""
        return self.predicted / self.row.published - 1


@dataclass(frozen=True)
class GroupErrors:
    """Errors of one group, of the rows that nothing was fitted to: their number, and |error|; `bias`: median error."""

    group: str
    checked: int
    fitted: int
    median: float
    worst: float
    bias: float


def compare_published(rows: Sequence[PublishedRow] | None = None) -> list[ComparedRow]:
    """Every measurement with its prediction."""
    return [ComparedRow(row, row.predict()) for row in (published_rows() if rows is None else rows)]


def group_errors(compared: Sequence[ComparedRow]) -> list[GroupErrors]:
    """The errors by group; rows that were fitted to are only counted."""
    found = []
    for group in published_groups():
        errors = [c.error for c in compared if c.row.group == group and not c.row.fit]
        fitted = sum(c.row.group == group and c.row.fit for c in compared)
        sizes = [abs(e) for e in errors]
        if errors:
            found.append(
                GroupErrors(group, len(errors), fitted, statistics.median(sizes), max(sizes), statistics.median(errors))
            )
    return found
