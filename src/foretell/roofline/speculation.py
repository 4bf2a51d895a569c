"""Predicted gain of a decoding method at its best draft length or tree: tokens per pass, pass and drafting time."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from foretell.roofline.acceptance import AcceptanceByRank, BestTrees, best_trees
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cost import CostBreakdown, device_rates, op_costs, total_cost
from foretell.roofline.drafter_cost import DrafterCost
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import Array, Number
from foretell.roofline.method_profiles import MethodProfile
from foretell.roofline.offload import PlacedOffload, offloaded_seconds
from foretell.roofline.op_graph import OpGraph
from foretell.roofline.workload import Phase, SequenceGroup, Workload

MAX_NODES, MAX_DEPTH = 256, 12
"""Largest tree considered, root included, and its depth."""
MAX_CHAIN = 4 * MAX_DEPTH
"""Longest chain considered, in drafted tokens."""


@dataclass(frozen=True)
class DraftShape:
    """A chain or tree that is given instead of searched: its nodes (root included), its depth, and, where they are
    known, the tokens per pass that it yields.

    Raises:
        ValueError: a tree that cannot exist, or tokens that it cannot yield.
    """

    nodes: int
    depth: int
    tokens: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depth < self.nodes:
            raise ValueError(
                f"a tree of depth {self.depth} drafts at least {self.depth} nodes, found {self.nodes - 1} drafted"
            )
        if self.tokens is not None and not 1 <= self.tokens <= self.depth + 1:
            raise ValueError(
                f"a tree of depth {self.depth} yields 1 to {self.depth + 1} tokens per pass, found {self.tokens:g}"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes that the drafter expands per level; a tree is taken to be equally wide at every level."""
        return (1, *[-(-(self.nodes - 1) // self.depth)] * (self.depth - 1))


@dataclass(frozen=True)
class MethodEstimate:
    """Predicted performance of a method on one workload.

    nodes: tokens verified per sequence, root included (1: none are drafted). depth 0: do not use it. tokens_per_pass:
    expected, per sequence. Times are in seconds per pass; draft_seconds: of drafting, with the runtime's own work per
    speculative step; plain_seconds: of a pass without speculation.
    """

    profile: MethodProfile
    nodes: int
    depth: int
    tokens_per_pass: float
    pass_seconds: float
    draft_seconds: float
    plain_seconds: float
    batch: int
    bytes_per_token: float
    ops_per_token: float
    accepted_spread: float = 0.0
    runtime_error: float = 0.0

    @property
    def is_used(self) -> bool:
        """Whether using the method is predicted to gain, or a shape of it was given; else the figures are those of
        plain decoding.
        """
        return self.depth > 0

    @property
    def shape(self) -> DraftShape:
        """The chain or tree with its tokens per pass."""
        return DraftShape(self.nodes, self.depth, self.tokens_per_pass)

    @property
    def range(self) -> tuple[float, float]:
        """Likely limits of the speed-up, from the spread of acceptance and the error of the runtime's profile."""
        if not self.is_used:
            return 1.0, 1.0
        of_tokens = self.accepted_spread * (self.tokens_per_pass - 1) / self.tokens_per_pass
        relative = math.hypot(of_tokens, self.runtime_error)
        return self.speedup * (1 - relative), self.speedup * (1 + relative)

    @property
    def speedup(self) -> float:
        """Throughput over that of plain decoding."""
        return self.tokens_per_pass * self.plain_seconds / (self.pass_seconds + self.draft_seconds)

    @property
    def goodput(self) -> float:
        """Output tokens per second of the whole batch."""
        return self.batch * self.tokens_per_pass / (self.pass_seconds + self.draft_seconds)

    @property
    def break_even_tokens(self) -> float:
        """Tokens per pass at which the method is as fast as plain decoding."""
        return (self.pass_seconds + self.draft_seconds) / self.plain_seconds


def verification_cost(
    graph: OpGraph, hardware: Hardware, workload: Workload, widths: Array, offload: PlacedOffload | None = None
) -> CostBreakdown:
    """Cost of one pass for each number of tokens per sequence in `widths`; `offload`: of weights and cache."""
    n = widths[:, None]
    sequences, tokens = (workload.batch * n, 1.0) if hardware.runtime.expansion else (float(workload.batch), n)
    phase = Phase((SequenceGroup(sequences, tokens, float(workload.context)),), workload.batch * n, 1.0, False)
    costs = op_costs(graph, phase, device_rates(workload, hardware))
    total = total_cost(costs)
    return total if offload is None else replace(total, seconds=offloaded_seconds(costs, offload))


def estimate_method(
    profile: MethodProfile,
    drafter: DrafterCost | None,
    model: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    max_nodes: int = MAX_NODES,
    shape: DraftShape | None = None,
    offload: PlacedOffload | None = None,
    passes: CostBreakdown | None = None,
) -> MethodEstimate:
    """The method at its fastest shape, among all chains or trees of up to `max_nodes` tokens, or at a given `shape`.

    offload: of the target; a drafter that is part of it is offloaded with it. passes: `target_passes` of the workload,
    where they are known.

    Raises:
        ValueError: fewer than one node, or a given shape that the method cannot draft.
    """
    if max_nodes < 1:
        raise ValueError(f"a tree needs at least one node, found a budget of {max_nodes}")
    widths = np.arange(1.0, widest_pass(profile, max_nodes, shape) + 1)
    target = passes or target_passes(model, hardware, workload, len(widths), offload)
    pass_seconds = np.asarray(target.seconds)
    draft_costs = _drafting_cost(drafter, hardware, workload, widths, offload)
    step = hardware.runtime.step_seconds(workload.batch, drafter is None)
    if shape is not None:
        candidates = [_given(profile, shape, drafter, np.asarray(draft_costs.seconds), step)]
    elif profile.shape == "fixed":
        candidates = [(1, 0, 1.0, 0.0), (profile.nodes, 1, profile.tokens, step)]
    else:
        speculative = _candidates(profile, drafter, max_nodes, np.asarray(draft_costs.seconds), pass_seconds, step)
        candidates = [(1, 0, 1.0, 0.0), *speculative]
    n, depth, tokens, seconds = max(candidates, key=lambda c: c[2] / (pass_seconds[c[0] - 1] + c[3]))
    draft_bytes, draft_ops = _draft_bytes_and_ops(profile, drafter, n, depth, draft_costs)
    return MethodEstimate(
        profile, n, depth, tokens, float(pass_seconds[n - 1]), seconds, float(pass_seconds[0]), workload.batch,
        (_at(target.bytes, n) + draft_bytes) / tokens / workload.batch,
        (_at(target.ops, n) + draft_ops) / tokens / workload.batch,
        0.0 if shape is not None and shape.tokens is not None else profile.spread, hardware.runtime.error,
    )  # fmt: skip


def widest_pass(profile: MethodProfile, max_nodes: int, shape: DraftShape | None) -> int:
    """Tokens per sequence of the widest pass that an estimate considers."""
    return max(shape.nodes if shape else max_nodes, profile.nodes if profile.shape == "fixed" else 1)


def target_passes(
    model: AnalyzedModel, hardware: Hardware, workload: Workload, widest: int, offload: PlacedOffload | None = None
) -> CostBreakdown:
    """Cost of a pass of the target over 1, 2, ..., `widest` tokens per sequence."""
    widths = np.arange(1.0, widest + 1)
    cost = verification_cost(model.graph(workload.fusion, False, workload.square), hardware, workload, widths, offload)
    return replace(cost, seconds=np.broadcast_to(np.asarray(cost.seconds), widths.shape))


def _at(values: Number, n: int) -> float:
    """The value for n tokens; the last one where there are fewer."""
    return float(np.atleast_1d(np.asarray(values, dtype=np.float64))[min(n, np.size(values)) - 1])


def _drafting_cost(
    drafter: DrafterCost | None, hardware: Hardware, workload: Workload, widths: Array, offload: PlacedOffload | None
) -> CostBreakdown:
    """Cost of one drafter pass for each number of tokens per sequence in `widths`."""
    if drafter is None:
        return CostBreakdown(seconds=np.zeros_like(widths))
    draft_workload = replace(workload, weights=drafter.weights or workload.weights, kv=drafter.kv or workload.kv)
    if drafter.per == "step":
        widths = widths[:1]
    shared = offload if not drafter.added_parameters else None
    return verification_cost(drafter.graph, hardware, draft_workload, widths, shared)


@lru_cache(maxsize=4096)
def cached_best_trees(acceptance: AcceptanceByRank, nodes: int, depth: int) -> BestTrees:
    """`best_trees`, cached: the trees do not depend on the workload."""
    return best_trees(acceptance, nodes, depth)


def _given(
    profile: MethodProfile, shape: DraftShape, drafter: DrafterCost | None, draft_pass_seconds: Array, step: float
) -> tuple[int, int, float, float]:
    """A given shape as (nodes, depth, tokens, draft seconds)."""
    if profile.max_depth is not None and shape.depth > profile.max_depth:
        raise ValueError(f"{profile.name} has {profile.max_depth} heads and cannot draft a tree of depth {shape.depth}")
    tokens = shape.tokens
    if tokens is None and profile.shape == "fixed":
        raise ValueError(f"{profile.name} has no acceptance by node: give the tokens per pass of the tree (--tau)")
    if tokens is None:
        tokens = cached_best_trees(profile.acceptance, shape.nodes, shape.depth).tokens[-1]
    if drafter is None:
        return shape.nodes, shape.depth, tokens, step
    passes = shape.widths if drafter.per == "level" else (1,)
    seconds = float(sum(_at(draft_pass_seconds, width) for width in passes))
    return shape.nodes, shape.depth, tokens, seconds + step


def _candidates(
    profile: MethodProfile,
    drafter: DrafterCost | None,
    max_nodes: int,
    draft_pass_seconds: Array,
    pass_seconds: Array,
    step: float,
) -> list[tuple[int, int, float, float]]:
    """The best size for every depth: (nodes, depth, tokens, draft seconds)."""
    candidates = []
    deepest = min(max_nodes, MAX_CHAIN) if profile.shape == "chain" else MAX_DEPTH
    if profile.largest is not None:
        max_nodes, deepest = min(max_nodes, profile.largest[0]), min(deepest, profile.largest[1])
    for depth in range(1, min(deepest, profile.max_depth or deepest) + 1):
        trees = cached_best_trees(profile.acceptance, max_nodes, depth)
        tokens = np.array(trees.tokens)
        seconds = _draft_seconds(drafter, trees, draft_pass_seconds) + step
        at = int(np.argmax(tokens / (pass_seconds[: len(tokens)] + seconds)))
        if at:
            candidates.append((at + 1, depth, float(tokens[at]), float(seconds[at])))
    return candidates


def _draft_seconds(drafter: DrafterCost | None, trees: BestTrees, pass_seconds: Array) -> Array:
    """Seconds of drafting each of the trees."""
    if drafter is None:
        return np.zeros(len(trees.tokens))
    if drafter.per == "step":
        return np.where(np.arange(len(trees.tokens)) > 0, pass_seconds[0], 0.0)
    widths = np.array(trees.nodes_expanded)
    return np.asarray(np.where(widths > 0, pass_seconds[np.maximum(widths, 1) - 1], 0.0).sum(1))


def _draft_bytes_and_ops(
    profile: MethodProfile, drafter: DrafterCost | None, nodes: int, depth: int, costs: CostBreakdown
) -> tuple[float, float]:
    """Bytes and OPs of drafting a tree of that size."""
    if drafter is None or nodes == 1:
        return 0.0, 0.0
    widths = cached_best_trees(profile.acceptance, nodes, depth).nodes_expanded[-1]
    if drafter.per == "step":
        widths = (1,)
    return sum(_at(costs.bytes, w) for w in widths if w), sum(_at(costs.ops, w) for w in widths if w)
