"""Decoding methods ranked by predicted speed-up, and the batch sizes at which each is profitable."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from foretell.roofline.acceptance import AcceptanceByRank
from foretell.roofline.analysis import AnalyzedModel, analyse
from foretell.roofline.cost import scalar
from foretell.roofline.drafter_cost import DrafterCost, default_draft_model
from foretell.roofline.family_acceptance import profile_for_target
from foretell.roofline.hardware import Hardware
from foretell.roofline.method_profiles import MethodProfile, cost_of_profile, method_profiles, profile_for_draft
from foretell.roofline.offload import PlacedOffload, resident_bytes
from foretell.roofline.speculation import (
    MAX_NODES,
    DraftShape,
    MethodEstimate,
    estimate_method,
    target_passes,
    widest_pass,
)
from foretell.roofline.workload import Workload

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of the speed-up curves."""


@dataclass(frozen=True)
class SpeculationPlan:
    """Methods ranked by speed-up on a workload.

    unavailable: methods that cannot be used, with the reason. baseline: plain decoding. fits: whether target and
    drafter fit in memory together; None: capacity unknown.
    """

    estimates: tuple[MethodEstimate, ...]
    unavailable: Mapping[str, str]
    baseline: MethodEstimate
    fits: Mapping[str, bool | None]

    @property
    def advice(self) -> str:
        """One sentence: the method to use, of those that fit in memory, or not to speculate."""
        fitting = [e for e in self.estimates if self.fits.get(e.profile.name) is not False]
        top = (fitting or [*self.estimates, self.baseline])[0]
        if not top.is_used:
            return f"Do not speculate: at batch {self.baseline.batch} every method is slower than plain decoding."
        if top.range[0] <= 1:
            low, high = top.range
            return (
                f"Measure first: {top.profile.name} is predicted at {top.speedup:.2f}×, with {low:.2f} to {high:.2f} "
                "within the spread of acceptance and of the runtime."
            )
        drafted = top.nodes - 1
        shape = {"chain": f" with a chain of {drafted}", "fixed": f" with its fixed {drafted} nodes"}.get(
            top.profile.shape, f" with a tree of {drafted} nodes, depth {top.depth}"
        )
        shape = shape if drafted else ""
        low, high = top.range
        gain = f"{top.speedup:.2f}× predicted, {low:.2f} to {high:.2f} ({top.tokens_per_pass:.2f} tokens per pass)"
        return f"Use {top.profile.name}{shape}: {gain}."


def profiles_for(
    target: AnalyzedModel, profiles: Mapping[str, MethodProfile], draft_model: AnalyzedModel | None
) -> dict[str, MethodProfile]:
    """The methods with the acceptance published for the target, or for the draft model that each would use."""
    draft = draft_model.name if draft_model else default_draft_model(target.name) or ""
    return {
        name: profile_for_target(profile_for_draft(profile, draft), target, draft) for name, profile in profiles.items()
    }


def drafter_costs(
    target: AnalyzedModel, profiles: Mapping[str, MethodProfile], draft_model: AnalyzedModel | None
) -> tuple[dict[str, DrafterCost | None], dict[str, str]]:
    """The drafting cost of every method for a target, and the methods that cannot be used, with the reason."""
    costs: dict[str, DrafterCost | None] = {}
    unavailable: dict[str, str] = {}
    for name, profile in profiles.items():
        try:
            costs[name] = cost_of_profile(profile, target, draft_model)
        except ValueError as error:
            unavailable[name] = str(error)
    return costs, unavailable


def rank_methods(
    target: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    profiles: Mapping[str, MethodProfile] | None = None,
    draft_model: AnalyzedModel | None = None,
    max_nodes: int = MAX_NODES,
    shape: DraftShape | None = None,
    offload: PlacedOffload | None = None,
) -> SpeculationPlan:
    """Rank decoding methods at the batch, context and formats of a workload; its stage is ignored.

    profiles: all by default. draft_model: a small built-in model of the target's family by default. max_nodes: of a
    tree. shape: a chain or tree in place of the best one; methods that cannot draft it are unavailable. offload: of the
    target.

    Raises:
        ValueError: fewer than one node.
    """
    if max_nodes < 1:
        raise ValueError(f"a tree needs at least one node, found a budget of {max_nodes}")
    profiles = profiles_for(target, method_profiles() if profiles is None else profiles, draft_model)
    costs, unavailable = drafter_costs(target, profiles, draft_model)
    estimates = list[MethodEstimate]()
    widest = max((widest_pass(profile, max_nodes, shape) for profile in profiles.values()), default=1)
    passes = target_passes(target, hardware, workload, widest, offload)
    for name, cost in costs.items():
        try:
            estimates.append(
                estimate_method(profiles[name], cost, target, hardware, workload, max_nodes, shape, offload, passes)
            )
        except ValueError as error:
            unavailable[name] = str(error)
    estimates.sort(key=lambda e: -e.speedup)
    plain = MethodProfile(
        "autoregressive", "Plain decoding", "none", "fixed", AcceptanceByRank((0.0,), ""), "exact", nodes=1, tokens=1.0
    )
    baseline = estimate_method(plain, None, target, hardware, workload, 1, offload=offload, passes=passes)
    analysis = analyse(target, hardware, replace(workload, stage="decode"))
    target_bytes = scalar(analysis.memory.total) if offload is None else resident_bytes(analysis, offload.offload)
    fits = {name: _fits(cost, target_bytes, hardware, workload) for name, cost in costs.items()}
    return SpeculationPlan(tuple(estimates), unavailable, baseline, fits)


def _fits(drafter: DrafterCost | None, target_bytes: float, hardware: Hardware, workload: Workload) -> bool | None:
    if hardware.capacity is None:
        return None
    if drafter is None:
        return target_bytes <= hardware.capacity
    weight_format, kv_format = drafter.weights or workload.weights, drafter.kv or workload.kv
    cached_tokens = workload.batch * (workload.context + 1)
    kv_bytes = drafter.graph.kv_elements * kv_format.bytes * cached_tokens
    drafter_bytes = (drafter.added_parameters * weight_format.bytes + kv_bytes) / workload.devices
    return target_bytes + drafter_bytes <= hardware.capacity


def estimates_by_batch(
    profile: MethodProfile,
    drafter: DrafterCost | None,
    target: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    offload: PlacedOffload | None = None,
    max_nodes: int = MAX_NODES,
    shape: DraftShape | None = None,
) -> list[MethodEstimate]:
    """The method at its best shape, or at a given one, for each of BATCHES."""
    return [
        estimate_method(profile, drafter, target, hardware, replace(workload, batch=b), max_nodes, shape, offload)
        for b in BATCHES
    ]


def profitable_batches(
    profile: MethodProfile,
    drafter: DrafterCost | None,
    target: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    offload: PlacedOffload | None = None,
) -> list[tuple[int, int]]:
    """Ranges of batch sizes within 1 to 256 at which the method is faster than plain decoding; edges by bisection.

    On a dense model a method is profitable up to some batch; on a mixture of experts often only between two.
    """

    def is_profitable(batch: int) -> bool:
        asked = replace(workload, batch=batch)
        return estimate_method(profile, drafter, target, hardware, asked, offload=offload).speedup > 1 + 1e-9

    known = {b: is_profitable(b) for b in BATCHES}
    bounds = [BATCHES[0]] if known[BATCHES[0]] else []
    for low, high in itertools.pairwise(BATCHES):
        if known[low] != known[high]:
            a, b = low, high
            while b - a > 1:
                middle = (a + b) // 2
                a, b = (middle, b) if is_profitable(middle) == known[low] else (a, middle)
            bounds.append(b)
    if known[BATCHES[-1]]:
        bounds.append(BATCHES[-1] + 1)
    return [(start, end - 1) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
