"""Variants of a model with cheaper passes: early exit, layer skipping, contextual sparsity, quantisation.

Unlike speculation they change the output of the model, and one pass yields one token (section 4.1 of arXiv 2402.16363).
"""

from dataclasses import dataclass, replace

from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.cost import device_rates, op_costs, scalar, total_cost
from foretell.roofline.drafter_cost import nested_feed_forward
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import ZERO, LinearCost, expected_active_experts
from foretell.roofline.op_graph import LayerGroup, Op, OpGraph, linear
from foretell.roofline.workload import Workload, phases, workload_sizes

PREDICTOR_RANK = 1000
"""Inner width of Deja Vu's predictor."""
SPARSE_OPS = ("gate_proj", "up_proj", "mlp_act", "down_proj")


def expected_exit_depth(share: float, rows: float) -> float:
    """Expected share of the layers that a batch runs: the maximum over its rows, each with mean `share`.

    The share of one row is modelled as Beta(a, 1); the maximum of N of them is Beta(aN, 1).
    """
    if share >= 1:
        return 1.0
    a = share / (1 - share) * rows
    return a / (a + 1)


def early_exit(graph: OpGraph, share: float, rows: float) -> OpGraph:
    """Rows exit after part of the layers; the skipped layers still project keys and values (CALM, arXiv 2207.07061), or
    update their recurrent state, without the cost of its inputs.

    The cost of the exit decision is not counted.
    """
    depth = expected_exit_depth(share, rows)
    groups: list[LayerGroup] = []
    for group in graph.groups:
        if not group.is_layer:
            groups.append(group)
            continue
        skipped = replace(
            group,
            name=f"{group.name} skipped",
            count=group.count * (1 - depth),
            ops=tuple(op for op in group.ops if op.kv_write != ZERO),
            live_activations=(),
            kv_elements=0.0,
            state_elements=0.0,
        )
        groups += [replace(group, count=group.count * depth), skipped]
    return replace(graph, groups=tuple(groups))


def skip_layers(graph: OpGraph, share: float) -> OpGraph:
    """All rows run the same part of the layers, `share` on average over positions (SkipDecode, arXiv 2307.02628).

    Skipped layers neither write nor read keys and values.
    """
    groups = (replace(g, count=g.count * share) if g.is_layer else g for g in graph.groups)
    return replace(graph, groups=tuple(groups))


def contextual_sparsity(graph: OpGraph, hidden: int, ffn: int, density: float, rows: float) -> OpGraph:
    """The feed-forward computes only the neurons that a predictor selects (Deja Vu, arXiv 2310.17157).

    A batch reads the union of its rows' neurons, 1 - (1 - density)^N of all.
    """
    union = float(expected_active_experts(1.0, density, rows))
    groups = []
    for group in graph.groups:
        ops = tuple(_sparse_op(op, density, union) if op.name in SPARSE_OPS else op for op in group.ops)
        if group.is_layer:
            ops = (*ops, *sparsity_predictor(hidden, ffn))
        groups.append(replace(group, ops=ops))
    return replace(graph, groups=tuple(groups))


def sparsity_predictor(hidden: int, ffn: int) -> tuple[Op, Op]:
    """The two products of the predictor that selects the neurons of a layer."""
    first = linear("predictor_in", hidden, PREDICTOR_RANK, "mlp_norm", "replicated")
    return first, linear("predictor_out", PREDICTOR_RANK, ffn, "predictor_in", "column")


def _sparse_op(op: Op, density: float, union: float) -> Op:
    read = op.read.scaled(density) if op.name in ("mlp_act", "down_proj") else op.read
    write = op.write.scaled(density) if op.name != "down_proj" else op.write
    weights = LinearCost(constant=op.weights.constant * union)
    return replace(op, work=op.work.scaled(density), weights=weights, read=read, write=write)


@dataclass(frozen=True)
class ModelVariant:
    """Predicted time, bytes and OPs of a decode pass of a variant; baseline_seconds: of the unchanged model."""

    name: str
    title: str
    seconds: float
    baseline_seconds: float
    bytes: float
    ops: float

    @property
    def speedup(self) -> float:
        """Over the unchanged model."""
        return self.baseline_seconds / self.seconds


def check_part(name: str, part: float) -> None:
    """Check a share of the layers or a density.

    Raises:
        ValueError: it lies outside (0, 1].
    """
    if not 0 < part <= 1:
        raise ValueError(f"the {name} must lie in (0, 1], found {part:g}")


def model_variants(
    model: AnalyzedModel, hardware: Hardware, workload: Workload, share: float = 0.5, density: float = 0.2
) -> list[ModelVariant]:
    """Predicted decode pass of every variant, at the batch and context of a workload, fastest first.

    share: part of the layers that early exit and skipping run on average. density: part of the feed-forward that one
    token activates.

    Raises:
        ValueError: a share or density outside (0, 1].
    """
    check_part("share of layers", share)
    check_part("density", density)
    decode, config = replace(workload, stage="decode"), model.config
    base = model.graph(workload.fusion, False, workload.square)
    rows = float(workload.batch)
    half = nested_feed_forward(model, 0.5).graph(workload.fusion, False)
    four, eight = parse_format("4g128"), parse_format("8")
    table: list[tuple[str, str, OpGraph, Workload]] = [
        ("early-exit", f"Early exit, {share:g} of the layers per token (CALM)", early_exit(base, share, rows), decode),
        (
            "skip-layers",
            f"Layer skipping, {share:g} of the layers per position (SkipDecode)",
            skip_layers(base, share),
            decode,
        ),
        ("nested", "Half the feed-forward (MatFormer)", half, decode),
        ("weights-4", "Weights in 4 bits, groups of 128", base, replace(decode, weights=four)),
        (
            "weights-8-activations-8",
            "Weights and activations in 8 bits",
            base,
            replace(decode, weights=eight, activations=eight),
        ),
        ("kv-4", "Cache in 4 bits, groups of 128", base, replace(decode, kv=four)),
    ]
    if config.experts is None:
        sparse = contextual_sparsity(base, config.hidden, config.ffn, density, rows)
        table.append(("sparse", f"Contextual sparsity, {density:g} of the feed-forward (Deja Vu)", sparse, decode))
    baseline = _cost(base, hardware, decode)[0]
    variants = []
    for name, title, graph, changed in table:
        seconds, moved, ops = _cost(graph, hardware, changed)
        variants.append(ModelVariant(name, title, seconds, baseline, moved, ops))
    return sorted(variants, key=lambda v: v.seconds)


def _cost(graph: OpGraph, hardware: Hardware, workload: Workload) -> tuple[float, float, float]:
    """Seconds, bytes and OPs of a decode pass."""
    (phase,) = phases("decode", workload_sizes(workload))
    cost = total_cost(op_costs(graph, phase, device_rates(workload, hardware)))
    return scalar(cost.seconds), scalar(cost.bytes), scalar(cost.ops)
