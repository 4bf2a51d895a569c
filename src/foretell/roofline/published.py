"""Predictions of the published measurements, with the errors by group."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from foretell.roofline.analysis import AnalyzedModel, analyse, builtin_model, predict_seconds
from foretell.roofline.cost import scalar
from foretell.roofline.fitted_acceptance import fit_without
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware, known_hardware, memory_tier
from foretell.roofline.method_profiles import cost_of_profile, find_method
from foretell.roofline.offload import Offload, apply_offload, place_offload, share_outside
from foretell.roofline.published_rows import PublishedRow, published_goals, published_groups, published_rows
from foretell.roofline.runtime import Runtime, find_runtime
from foretell.roofline.speculation import DraftShape, estimate_method
from foretell.roofline.workload import Workload


def predict_row(row: PublishedRow, runtime: Runtime | None = None) -> float:
    """The prediction of a measured figure; `runtime`: in place of the row's own."""
    model, workload = builtin_model(row.model), _workload(row)
    hardware = replace(_hardware()[row.hardware], runtime=runtime or find_runtime(row.runtime))
    if row.measure == "speedup":
        profile, shape = find_method(row.method), DraftShape(row.nodes, row.depth, row.tau)
        drafter = cost_of_profile(profile, model, builtin_model(row.draft) if row.draft else None)
        return estimate_method(profile, drafter, model, hardware, workload, shape=shape).speedup
    if row.offload:
        return _offloaded_seconds(model, hardware, workload)
    seconds = predict_seconds(model, hardware, workload)
    return 1 / seconds if row.measure == "tokens_per_second" else seconds


def _workload(row: PublishedRow) -> Workload:
    """The workload that was measured."""
    form = parse_format(row.weights)
    return Workload("verify", row.batch, row.context, row.tokens, weights=form, fusion="flash", devices=row.devices)


@cache
def _hardware() -> Mapping[str, Hardware]:
    return known_hardware()


def _offloaded_seconds(model: AnalyzedModel, hardware: Hardware, workload: Workload) -> float:
    """Time of a pass whose weights come from the host as far as they do not fit."""
    analysis = analyse(model, hardware, workload)
    offload = Offload(memory_tier("ddr"), share_outside(scalar(analysis.memory.weights), hardware), 0.0, "device")
    return apply_offload(analysis, place_offload(offload, hardware, _hardware())).seconds


@dataclass(frozen=True)
class ComparedRow:
    """A measurement and its prediction.

    tokens: per pass, predicted from the other papers' (None: no speed-up, or none of them has the drafter).
    from_tokens: the prediction with these in place of the published ones.
    """

    row: PublishedRow
    predicted: float
    tokens: float | None = None
    from_tokens: float | None = None

    @property
    def error(self) -> float:
        """Relative to the published figure."""
        return self.predicted / self.row.published - 1

    @property
    def error_from_tokens(self) -> float | None:
        """Relative to the published figure, with predicted tokens per pass."""
        return None if self.from_tokens is None else self.from_tokens / self.row.published - 1


@dataclass(frozen=True)
class GroupErrors:
    """Errors of one group, of the rows that nothing was fitted to: their number, and |error|; `bias`: median error.

    unseen: those with predicted tokens per pass; unseen_median: their |error| with these. goal: for that, or None.
    """

    group: str
    checked: int
    fitted: int
    median: float
    worst: float
    bias: float
    unseen: int
    unseen_median: float | None
    goal: float | None


def compare_published() -> list[ComparedRow]:
    """Every measurement with its prediction."""
    return [_compare(row) for row in published_rows()]


def _compare(row: PublishedRow) -> ComparedRow:
    tokens = fit_without(row.paper).tokens(row) if row.method else None
    return ComparedRow(row, predict_row(row), tokens, None if tokens is None else predict_row(replace(row, tau=tokens)))


def group_errors(compared: Sequence[ComparedRow]) -> list[GroupErrors]:
    """The errors by group; rows that were fitted to are only counted."""
    by_group = []
    for group in published_groups():
        checked = [c for c in compared if c.row.group == group and not c.row.fit]
        if not checked:
            continue
        errors = [c.error for c in checked]
        sizes = [abs(e) for e in errors]
        unseen = [abs(e) for c in checked if (e := c.error_from_tokens) is not None]
        by_group.append(
            GroupErrors(
                group, len(checked), sum(c.row.group == group and c.row.fit for c in compared),
                statistics.median(sizes), max(sizes), statistics.median(errors),
                len(unseen), statistics.median(unseen) if unseen else None, published_goals().get(group),
            )
        )  # fmt: skip
    return by_group
