"""Table 1 of the survey: twelve operations of a Llama-2-7b layer, two stages, on an A6000 (2048 tokens, 16 bits)."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.roofline.attention import Fusion
from foretell.roofline.cost import OpCost, device_rates, op_costs, scalar
from foretell.roofline.graph_builder import build_graph
from foretell.roofline.hardware import known_hardware
from foretell.roofline.model_configs import find_model
from foretell.roofline.paper.accounting import paper_graph
from foretell.roofline.workload import Stage, Workload, phases, workload_sizes

OP_OF_ROW: Mapping[str, str] = {
    "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj", "gate_proj": "gate_proj",
    "up_proj": "up_proj", "down_proj": "down_proj", "qk_matmul": "qk_matmul", "sv_matmul": "sv_matmul",
    "softmax": "softmax",
    "norm": "attn_norm", "add": "attn_add",
}  # fmt: skip
"""Operation of our graph by row of the table."""
CONTEXT, MODEL, DEVICE = 2048, "llama-2-7b", "a6000"


@dataclass(frozen=True)
class Table1Row:
    """A row in the paper's accounting; exact_ops, exact_bytes: ours (causal, all operands, the new token included)."""

    stage: str
    name: str
    ops: float
    bytes: float
    intensity: float
    performance: float
    bound: str
    exact_ops: float
    exact_bytes: float


def table1() -> tuple[Table1Row, ...]:
    """The 24 rows, prefill before decode."""
    _, config = find_model(MODEL)
    device = known_hardware()[DEVICE]
    rows: list[Table1Row] = []
    unfused: Fusion = "none"
    stages: tuple[Stage, ...] = ("prefill", "decode")
    for stage in stages:
        workload = Workload(stage, context=CONTEXT, fusion=unfused)
        (phase,) = phases(workload.stage, workload_sizes(workload))
        rates = device_rates(workload, device)
        paper_ops = {c.op.name: c for c in op_costs(paper_graph(config), phase, rates)}
        own_ops = {c.op.name: c for c in op_costs(build_graph(config, fusion=unfused), phase, rates)}
        rows.extend(_row(stage, name, paper_ops[op], own_ops[op]) for name, op in OP_OF_ROW.items())
    return tuple(rows)


def _row(stage: str, name: str, paper_ops: OpCost, own_ops: OpCost) -> Table1Row:
    c = paper_ops.cost
    return Table1Row(
        stage, name, scalar(c.ops), scalar(c.bytes), paper_ops.intensity, paper_ops.attainable, paper_ops.bound,
        scalar(own_ops.cost.ops), scalar(own_ops.cost.bytes),
    )  # fmt: skip
