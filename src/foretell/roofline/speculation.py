"""Predicted gain of a decoding method at its best draft length or tree: tokens per pass, pass and drafting time."""

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
from foretell.roofline.op_graph import OpGraph
from foretell.roofline.workload import Phase, SequenceGroup, Workload

MAX_NODES, MAX_DEPTH = 256, 12
"""Largest tree considered, root included, and its depth."""
MAX_CHAIN = 4 * MAX_DEPTH
"""Longest chain considered, in drafted tokens."""


@dataclass(frozen=True)
class MethodEstimate:
    """Predicted performance of a method on one workload.

    nodes: tokens verified per sequence, root included (1: do not speculate). tokens_per_pass: expected, per sequence.
    Times are in seconds per pass; plain_seconds: of a pass without speculation.
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


def verification_cost(graph: OpGraph, hardware: Hardware, workload: Workload, widths: Array) -> CostBreakdown:
    """Cost of one pass for each number of tokens per sequence in `widths`."""
    n = widths[:, None]
    phase = Phase((SequenceGroup(float(workload.batch), n, float(workload.context)),), workload.batch * n, 1.0, False)
    return total_cost(op_costs(graph, phase, device_rates(workload, hardware)))


def estimate_method(
    profile: MethodProfile,
    drafter: DrafterCost | None,
    model: AnalyzedModel,
    hardware: Hardware,
    workload: Workload,
    max_nodes: int = MAX_NODES,
) -> MethodEstimate:
    """The method at its fastest shape, among all chains or trees of up to `max_nodes` tokens.

    Raises:
        ValueError: fewer than one node.
    """
    if max_nodes < 1:
        raise ValueError(f"a tree needs at least one node, found a budget of {max_nodes}")
    widths = np.arange(1.0, max(max_nodes, profile.nodes if profile.shape == "fixed" else 1) + 1)
    target = verification_cost(model.graph(workload.fusion, False, workload.square), hardware, workload, widths)
    pass_seconds = np.broadcast_to(np.asarray(target.seconds), widths.shape)
    draft_costs = _drafting_cost(drafter, hardware, workload, widths)
    candidates = [(1, 0, 1.0, 0.0)]
    if profile.shape == "fixed":
        candidates.append((profile.nodes, 1, profile.tokens, 0.0))
    else:
        candidates.extend(_candidates(profile, drafter, max_nodes, np.asarray(draft_costs.seconds), pass_seconds))
    n, depth, tokens, seconds = max(candidates, key=lambda c: c[2] / (pass_seconds[c[0] - 1] + c[3]))
    draft_bytes, draft_ops = _draft_bytes_and_ops(profile, drafter, n, depth, draft_costs)
    return MethodEstimate(
        profile, n, depth, tokens, float(pass_seconds[n - 1]), seconds, float(pass_seconds[0]), workload.batch,
        (_at(target.bytes, n) + draft_bytes) / tokens / workload.batch,
        (_at(target.ops, n) + draft_ops) / tokens / workload.batch,
    )  # fmt: skip


def _at(values: Number, n: int) -> float:
    """The value for n tokens; the last one where there are fewer."""
    return float(np.atleast_1d(np.asarray(values, dtype=np.float64))[min(n, np.size(values)) - 1])


def _drafting_cost(drafter: DrafterCost | None, hardware: Hardware, workload: Workload, widths: Array) -> CostBreakdown:
    """Cost of one drafter pass for each number of tokens per sequence in `widths`."""
    if drafter is None:
        return CostBreakdown(seconds=np.zeros_like(widths))
    draft_workload = replace(workload, weights=drafter.weights or workload.weights, kv=drafter.kv or workload.kv)
    if drafter.per == "step":
        widths = widths[:1]
    return verification_cost(drafter.graph, hardware, draft_workload, widths)


@lru_cache(maxsize=4096)
def cached_best_trees(acceptance: AcceptanceByRank, nodes: int, depth: int) -> BestTrees:
    """`best_trees`, cached: the trees do not depend on the workload."""
    return best_trees(acceptance, nodes, depth)


def _candidates(
    profile: MethodProfile, drafter: DrafterCost | None, max_nodes: int, draft_pass_seconds: Array, pass_seconds: Array
) -> list[tuple[int, int, float, float]]:
    """The best size for every depth: (nodes, depth, tokens, draft seconds)."""
    found = []
    for depth in range(1, (min(max_nodes, MAX_CHAIN) if profile.shape == "chain" else MAX_DEPTH) + 1):
        trees = cached_best_trees(profile.acceptance, max_nodes, depth)
        tokens = np.array(trees.tokens)
        seconds = _draft_seconds(drafter, trees, draft_pass_seconds)
        at = int(np.argmax(tokens / (pass_seconds[: len(tokens)] + seconds)))
        if at:
            found.append((at + 1, depth, float(tokens[at]), float(seconds[at])))
    return found


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
