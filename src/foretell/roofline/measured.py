"""Acceptance that a benchmark has measured: profiles of its methods, and its speed-ups beside the predictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.roofline.acceptance import AcceptanceByRank, fit_acceptance
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cost import device_rates, op_costs, scalar, total_cost
from foretell.roofline.drafting_time import DraftingTime
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware
from foretell.roofline.method_profiles import MethodProfile, cost_of_profile, find_method, with_draft_vocab
from foretell.roofline.speculation import DraftShape, estimate_method
from foretell.roofline.workload import Phase, SequenceGroup, Workload

PLAIN = "autoregressive"
"""Plain decoding in a calibration."""


@dataclass(frozen=True)
class MeasuredPasses:
    """Means over the passes after the prompts: requests in a pass; tokens read, drafted and decided of each; tokens of
    a sequence; plain_requests: in a pass of plain decoding.
    """

    requests: float
    read: float
    drafted: float
    tokens: float
    context: float
    plain_requests: float


@dataclass(frozen=True)
class MeasuredMethod:
    """What a run has measured of a method.

    name: of the catalogue; variant: with the number of its drafts, as in the run. weights: the number format. tokens,
    drafted: per pass. cumulative: share of all passes that accepted a draft at depth 1, 2, … speedup: over plain
    decoding of the same weights; None: not measured. model: of the run with its dtype, as calibrations of drafting are
    named. passes: None in results of older versions.
    """

    name: str
    weights: str
    tokens: float
    drafted: float
    cumulative: tuple[float, ...]
    speedup: float | None
    source: str
    variant: str = ""
    model: str = ""
    passes: MeasuredPasses | None = None

    @property
    def shape(self) -> DraftShape | None:
        """The mean pass as a tree; None: it drafts nothing."""
        nodes = 1 + math.ceil(self.drafted)
        depth = min(len(self.cumulative), nodes - 1)
        return DraftShape(nodes, depth, min(self.tokens, depth + 1.0)) if depth else None

    def profile(self) -> MethodProfile:
        """The method's profile with this acceptance: by depth for a chain, by rank for a tree.

        Raises:
            ValueError: no such method, or one that drafted nothing.
        """
        known, shape = find_method(self.name), self.shape
        if shape is None:
            raise ValueError(f"{self.source}: {self.name} drafted nothing, so nothing is known of its acceptance")
        if known.shape == "fixed":
            chosen = replace(known, nodes=shape.nodes, tokens=self.tokens)
            return replace(chosen, acceptance=AcceptanceByRank((0.0,), self.source), basis="measured")
        if known.shape == "chain":
            acceptance = _of_chain(self.cumulative[: shape.depth], self.source)
        else:
            acceptance = fit_acceptance(self.tokens, shape.nodes, shape.depth, self.source)
        return replace(known, acceptance=acceptance, basis="measured", largest=(shape.nodes, shape.depth))


def _of_chain(cumulative: Sequence[float], source: str) -> AcceptanceByRank:
    first = cumulative[0]
    if not first:
        return AcceptanceByRank((0.0,), source)
    conditional = [b / a if a else 0.0 for a, b in zip((1.0, *cumulative), cumulative, strict=False)]
    return AcceptanceByRank((first,), source, by_depth=tuple(min(c, 1.0) / first for c in conditional))


DEFAULT_CONTEXT = 256
"""Cached tokens where a run states none."""


def measured_workload(method: MeasuredMethod, context: int | None = None) -> Workload:
    """The workload of a run of a method; `context`: cached tokens, in place of the run's."""
    passes, form = method.passes, parse_format(method.weights)
    if context is None:
        context = round(passes.context) if passes else DEFAULT_CONTEXT
    batch = max(1, round(passes.requests)) if passes else 1
    return Workload("decode", batch, context, weights=form, activations=form, fusion="full")


def pass_seconds(target: AnalyzedModel, hardware: Hardware, workload: Workload, requests: float, read: float) -> float:
    """Predicted seconds of a pass over so many requests, with `read` tokens of each."""
    phase = Phase((SequenceGroup(requests, read, float(workload.context)),), np.array([requests * read]), 1.0, False)
    costs = op_costs(target.graph(workload.fusion, False), phase, device_rates(workload, hardware))
    return scalar(total_cost(costs).seconds)


def calibrated_speedup(
    method: MeasuredMethod, target: AnalyzedModel, hardware: Hardware, workload: Workload
) -> float | None:
    """The speed-up from predicted passes and the calibrated times outside them; None: these were not calibrated."""
    known, passes = hardware.drafting.get(method.model, {}), method.passes
    if passes is None or not {method.variant, PLAIN} <= set(known):
        return None

    def seconds(name: str, requests: float, read: float, drafted: float) -> float:
        of_pass = pass_seconds(target, hardware, workload, requests, read)
        return of_pass + DraftingTime(*known[name]).seconds(requests, drafted)

    plain = seconds(PLAIN, passes.plain_requests, 1.0, 0.0)
    return passes.tokens * plain / seconds(method.variant, passes.requests, passes.read, passes.drafted)


@dataclass(frozen=True)
class MeasuredRow:
    """A measured speed-up and its prediction from the measured acceptance; `calibrated`: with the measured time of its
    drafting, else with the predicted cost of its drafter.
    """

    method: MeasuredMethod
    measured: float
    predicted: float
    calibrated: bool = False

    @property
    def error(self) -> float:
        """Relative to the measured speed-up."""
        return self.predicted / self.measured - 1


def compare_measured(
    methods: Sequence[MeasuredMethod],
    target: AnalyzedModel,
    hardware: Hardware,
    workloads: Sequence[Workload],
    draft_model: AnalyzedModel | None = None,
    draft_vocab: int | None = None,
) -> tuple[list[MeasuredRow], dict[str, str]]:
    """The measured speed-ups beside the predictions, `workloads` one for each method; and what cannot be predicted.

    draft_vocab: see `with_draft_vocab`.
    """
    rows, left_out = list[MeasuredRow](), dict[str, str]()
    for method, workload in zip(methods, workloads, strict=True):
        try:
            if method.speedup is None:
                raise ValueError("the run has no plain decoding of the same weights")
            if (speedup := calibrated_speedup(method, target, hardware, workload)) is not None:
                rows.append(MeasuredRow(method, method.speedup, speedup, True))
                continue
            profile = with_draft_vocab(method.profile(), draft_vocab)
            drafter = cost_of_profile(profile, target, draft_model)
            estimate = estimate_method(profile, drafter, target, hardware, workload, shape=method.shape)
        except ValueError as error:
            left_out[method.name] = str(error)
        else:
            rows.append(MeasuredRow(method, method.speedup, estimate.speedup))
    return rows, left_out
