"""Table 1 of arXiv 2402.16363, as printed there; and what the survey's tool totals for the same setting."""

from dataclasses import replace

import pytest

from foretell.roofline.cost import device_rates, op_costs, scalar, total_cost
from foretell.roofline.hardware import known_hardware
from foretell.roofline.memory import memory_use
from foretell.roofline.model_configs import find_model
from foretell.roofline.paper.accounting import paper_graph
from foretell.roofline.paper.table1 import table1
from foretell.roofline.records import table1_text
from foretell.roofline.workload import Stage, Workload, phases, workload_sizes

PRINTED = """
prefill q_proj     69G  67M  1024 155T compute
prefill k_proj     69G  67M  1024 155T compute
prefill v_proj     69G  67M  1024 155T compute
prefill o_proj     69G  67M  1024 155T compute
prefill gate_proj  185G 152M 1215 155T compute
prefill up_proj    185G 152M 1215 155T compute
prefill down_proj  185G 152M 1215 155T compute
prefill qk_matmul  34G  302M 114  87T  memory
prefill sv_matmul  34G  302M 114  87T  memory
prefill softmax    671M 537M 1.25 960G memory
prefill norm       59M  34M  1.75 1T   memory
prefill add        8M   34M  0.25 192G memory
decode  q_proj     34M  34M  1    768G memory
decode  k_proj     34M  34M  1    768G memory
decode  v_proj     34M  34M  1    768G memory
decode  o_proj     34M  34M  1    768G memory
decode  gate_proj  90M  90M  1    768G memory
decode  up_proj    90M  90M  1    768G memory
decode  down_proj  90M  90M  1    768G memory
decode  qk_matmul  17M  17M  0.99 762G memory
decode  sv_matmul  17M  17M  0.99 762G memory
decode  softmax    328K 262K 1.25 960G memory
decode  norm       29K  16K  1.75 1T   memory
decode  add        4K   16K  0.25 192G memory
""".strip().splitlines()
SCALE = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def rounded(value: float, like: str) -> str:
    """The number written with the unit and decimals of the printed one."""
    if like[-1] in SCALE:
        return f"{value / SCALE[like[-1]]:.0f}{like[-1]}"
    return f"{value:.{len(like.partition('.')[2])}f}"


def test_all_24_rows_are_reproduced() -> None:
    rows = table1()
    assert len(rows) == len(PRINTED) == 24
    for row, printed in zip(rows, PRINTED, strict=True):
        stage, name, *figures, bound = printed.split()
        assert (row.stage, row.name, row.bound) == (stage, name, bound)
        for found, like in zip((row.ops, row.bytes, row.intensity, row.performance), figures, strict=True):
            assert rounded(found, like) == like, printed


def test_the_table_is_printed_in_the_papers_rounding() -> None:
    for record, printed in zip(table1_text(table1()), PRINTED, strict=True):
        assert list(record.values())[:7] == printed.split()


@pytest.mark.parametrize(
    ("stage", "seconds", "ops", "moved", "alive"),
    [("prefill", 226.879e-3, 28.7512e12, 65.861e9, 0), ("decode", 18.6369e-3, 14.1697e9, 14.3132e9, 0)],
)
def test_the_totals_of_the_surveys_tool(stage: Stage, seconds: float, ops: float, moved: float, alive: float) -> None:
    _, config = find_model("llama-2-7b")
    a6000 = known_hardware()["a6000"]
    a6000 = replace(a6000, peaks={"fp16": 309.677e12 / 2}, vector_rate=0.0)
    workload = Workload(stage, context=2048)
    (phase,) = phases(stage, workload_sizes(workload))
    rates = device_rates(workload, a6000)
    network = paper_graph(config)
    cost = total_cost(op_costs(network, phase, rates))
    assert scalar(cost.seconds) == pytest.approx(seconds, rel=1e-5)
    assert scalar(cost.ops) == pytest.approx(ops, rel=1e-5)
    assert scalar(cost.bytes) == pytest.approx(moved, rel=2e-5)
    used = memory_use([(network, phase)], rates)
    assert scalar(used.weights) == pytest.approx(12.952e9, rel=1e-4)
