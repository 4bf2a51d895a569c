"""Acceptance that a benchmark has measured: profiles of its methods, and its speed-ups beside the predictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretell.roofline.acceptance import AcceptanceByRank, fit_acceptance
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.hardware import Hardware
from foretell.roofline.method_profiles import MethodProfile, find_method, with_draft_vocab
from foretell.roofline.plan import cost_of_profile
from foretell.roofline.speculation import DraftShape, estimate_method
from foretell.roofline.workload import Workload


@dataclass(frozen=True)
class MeasuredMethod:
    """What a run has measured of a method, one request at a time.

    name: of the catalogue. weights: the number format. tokens, drafted: per pass. cumulative: share of all passes that
    accepted a draft at depth 1, 2, … speedup: over plain decoding of the same weights; None: not measured.
    """

    name: str
    weights: str
    tokens: float
    drafted: float
    cumulative: tuple[float, ...]
    speedup: float | None
    source: str

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


@dataclass(frozen=True)
class MeasuredRow:
    """A measured speed-up and its prediction from the measured acceptance."""

    method: MeasuredMethod
    measured: float
    predicted: float

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
            profile = with_draft_vocab(method.profile(), draft_vocab)
            drafter = cost_of_profile(profile, target, draft_model)
            found = estimate_method(profile, drafter, target, hardware, workload, shape=method.shape)
        except ValueError as error:
            left_out[method.name] = str(error)
        else:
            rows.append(MeasuredRow(method, method.speedup, found.speedup))
    return rows, left_out
