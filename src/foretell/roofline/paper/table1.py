"""Table 1 of the survey: one layer of Llama-2-7b on an A6000, 2048 tokens, batch 1, 16 bits; twelve operations in two
stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.roofline.attention import Fusion
from foretell.roofline.cost import Line, lines, rates, value
from foretell.roofline.graph_builder import network
from foretell.roofline.hardware import devices
from foretell.roofline.model_configs import find
from foretell.roofline.paper.accounting import paper_network
from foretell.roofline.workload import Setting, Stage, phases, sizes

NAMES: Mapping[str, str] = {
    "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj", "gate_proj": "gate_proj",
    "up_proj": "up_proj", "down_proj": "down_proj", "qk_matmul": "qk_matmul", "sv_matmul": "sv_matmul",
    "softmax": "softmax",
    "norm": "attn_norm", "add": "attn_add",
}  # fmt: skip
"""Row of the table to our operation."""
CONTEXT, MODEL, DEVICE = 2048, "llama-2-7b", "a6000"


@dataclass(frozen=True)
class Row:
    """A row as the paper counts it, and OPs and bytes as we count them (causal, all operands, the new token
    included).
    """

    stage: str
    name: str
    ops: float
    bytes: float
    intensity: float
    performance: float
    bound: str
    exact_ops: float
    exact_bytes: float


def table1() -> tuple[Row, ...]:
    """The 24 rows, prefill before decode."""
    _, config = find(MODEL)
    device = devices()[DEVICE]
    rows: list[Row] = []
    unfused: Fusion = "none"
    stages: tuple[Stage, ...] = ("prefill", "decode")
    for stage in stages:
        setting = Setting(stage, context=CONTEXT, fusion=unfused)
        (phase,) = phases(setting.stage, sizes(setting))
        r = rates(setting, device)
        theirs = {line.op.name: line for line in lines(paper_network(config), phase, r)}
        ours = {line.op.name: line for line in lines(network(config, fusion=unfused), phase, r)}
        rows.extend(_row(stage, name, theirs[op], ours[op]) for name, op in NAMES.items())
    return tuple(rows)


def _row(stage: str, name: str, theirs: Line, ours: Line) -> Row:
    c = theirs.cost
    return Row(
        stage, name, value(c.ops), value(c.bytes), theirs.intensity, theirs.attainable, theirs.bound,
        value(ours.cost.ops), value(ours.cost.bytes),
    )  # fmt: skip
