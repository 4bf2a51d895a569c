"""Results of the analyzer as records, for JSON, CSV and simple tables."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.roofline.analysis import Analysis, AnalyzedModel
from foretell.roofline.arrivals import LoadComparison
from foretell.roofline.calibrate import PredictionCheck
from foretell.roofline.cost import CostBreakdown, OpCost, scalar
from foretell.roofline.fitted_acceptance import AcceptanceFit
from foretell.roofline.hardware import Hardware
from foretell.roofline.measured import MeasuredRow
from foretell.roofline.model_variants import ModelVariant
from foretell.roofline.paper.table1 import Table1Row
from foretell.roofline.plan import SpeculationPlan
from foretell.roofline.published import ComparedRow, GroupErrors
from foretell.roofline.published_loads import ComparedLoad
from foretell.roofline.speculation import MethodEstimate
from foretell.roofline.sweep import SweepResult

Record = Mapping[str, Any]


def _cost_record(cost: CostBreakdown) -> dict[str, float]:
    """OPs, and bytes by class."""
    names = ("ops", "bytes", "weights", "read", "write", "kv_read", "kv_write", "link")
    return {name: scalar(getattr(cost, name)) for name in names}


def op_record(c: OpCost) -> dict[str, Any]:
    """Figures of an operation in one layer."""
    return {
        "group": c.group, "count": c.count, "operation": c.op.name, "shape": c.op.shape, "kind": c.op.kind,
        **_cost_record(c.cost),
        "intensity": c.intensity, "attainable": c.attainable, "bound": c.bound, "seconds": scalar(c.cost.seconds),
    }  # fmt: skip


def analysis_record(a: Analysis) -> dict[str, Any]:
    """The whole analysis, for `--json`."""
    w, m = a.workload, a.memory
    return {
        "model": a.model.name,
        "hardware": a.hardware.name,
        "workload": {
            "stage": w.stage, "batch": w.batch, "context": w.context, "tokens": w.tokens, "chunk": w.chunk,
            "generate": w.generate, "weights": w.weights.name, "activations": w.activations.name, "kv": w.kv.name,
            "head": w.head_weights.name,
            "fusion": w.fusion, "devices": w.devices, "square": w.square, "runtime": a.hardware.runtime.name,
        },
        "total": {
            "seconds": a.seconds, "tokens": a.tokens, "tokens_per_second": a.tokens / a.seconds,
            **_cost_record(a.total),
        },
        "memory": {
            "weights": scalar(m.weights), "kv": scalar(m.kv), "activations": scalar(m.activations),
            "total": scalar(m.total),
            "capacity": a.hardware.capacity, "fits": a.fits, "largest_batch": a.largest_batch,
            "longest_context": a.longest_context,
        },
        "operations": [op_record(c) for c in a.op_costs],
    }  # fmt: skip


def estimate_record(e: MethodEstimate, fits: bool | None) -> dict[str, Any]:
    """Figures of a method."""
    return {
        "method": e.profile.name, "shape": e.profile.shape, "nodes": e.nodes, "depth": e.depth,
        "tokens_per_pass": e.tokens_per_pass, "pass_seconds": e.pass_seconds,
        "draft_seconds": e.draft_seconds, "break_even_tokens": e.break_even_tokens,
        "speedup": e.speedup, "low": e.range[0], "high": e.range[1], "goodput": e.goodput,
        "bytes_per_token": e.bytes_per_token,
        "ops_per_token": e.ops_per_token, "fits": fits, "basis": e.profile.basis, "source": e.profile.acceptance.source,
    }  # fmt: skip


def plan_records(plan: SpeculationPlan) -> list[dict[str, Any]]:
    """All methods, plain decoding last."""
    return [estimate_record(g, plan.fits[g.profile.name]) for g in plan.estimates] + [
        estimate_record(plan.baseline, None)
    ]


def plan_record(plan: SpeculationPlan, variants: Sequence[ModelVariant]) -> dict[str, Any]:
    """The plan and the model variants, for `--json`."""
    cheaper = [
        {
            "variant": v.name,
            "title": v.title,
            "seconds": v.seconds,
            "speedup": v.speedup,
            "bytes": v.bytes,
            "ops": v.ops,
        }
        for v in variants
    ]
    unavailable = dict(plan.unavailable)
    return {"advice": plan.advice, "methods": plan_records(plan), "unavailable": unavailable, "variants": cheaper}


def measured_record(row: MeasuredRow) -> dict[str, Any]:
    """A measured speed-up beside its prediction."""
    shape, passes = row.method.shape, row.method.passes
    return {
        "method": row.method.name, "requests": round(passes.requests, 1) if passes else 1,
        "weights": row.method.weights, "drafted": round(row.method.drafted, 2), "depth": shape.depth if shape else 0,
        "tokens_per_pass": round(row.method.tokens, 3), "measured": round(row.measured, 3),
        "predicted": round(row.predicted, 3), "error": f"{row.error:+.1%}",
        "drafting": "calibrated" if row.calibrated else "predicted",
    }  # fmt: skip


def model_record(model: AnalyzedModel, source: str) -> dict[str, Any]:
    """A model in the list."""
    c, graph = model.config, model.graph("flash", False)
    return {
        "name": model.name, "parameters": graph.parameters, "layers": c.layers, "hidden": c.hidden, "heads": c.heads,
        "kv_heads": c.kv_heads, "vocab": c.vocab, "cache_per_token": graph.kv_elements,
        "context": c.context, "source": source,
    }  # fmt: skip


def hardware_record(h: Hardware) -> dict[str, Any]:
    """A device in the list."""
    peaks = {c: h.peaks.get(c) for c in ("fp16", "fp8", "int8", "int4", "any")}
    return {
        "name": h.name,
        "bandwidth": h.bandwidth,
        "capacity": h.capacity,
        **peaks,
        "title": h.title,
        "source": h.source,
    }


def sweep_records(swept: SweepResult, capacity: float | None) -> list[dict[str, Any]]:
    """One record per workload of a sweep."""
    records = []
    for at, values in enumerate(swept.points()):
        row: dict[str, Any] = dict(zip(swept.axes, values, strict=True))
        row |= {
            "seconds": float(swept.seconds[at]), "tokens_per_second": float(swept.tokens[at] / swept.seconds[at]),
            "ops": float(swept.ops[at]), "bytes": float(swept.bytes[at]), "memory": float(swept.memory[at]),
            "fits": None if capacity is None else bool(swept.memory[at] <= capacity),
        }  # fmt: skip
        records.append(row)
    return records


def check_record(dtype: str, c: PredictionCheck) -> dict[str, Any]:
    """A predicted and measured pass."""
    return {
        "dtype": dtype, "tokens": c.tokens, "context": c.context, "predicted_ms": 1e3 * c.predicted,
        "measured_ms": 1e3 * c.measured, "error_percent": 100 * c.error,
    }  # fmt: skip


def table1_records(rows: Sequence[Table1Row]) -> list[dict[str, Any]]:
    """Rows of the paper's table, with our counts in the last two columns."""
    return [
        {
            "stage": r.stage, "layer": r.name, "ops": r.ops, "bytes": r.bytes, "intensity": r.intensity,
            "performance": r.performance, "bound": r.bound, "exact_ops": r.exact_ops, "exact_bytes": r.exact_bytes,
        }
        for r in rows
    ]  # fmt: skip


def published_record(c: ComparedRow) -> dict[str, Any]:
    """A published measurement and its prediction."""
    r = c.row
    workload = {"batch": r.batch, "weights": r.weights, "devices": r.devices}
    drafted = {"drafted": r.nodes - 1 if r.nodes else None, "tau": r.tau or None}
    return {
        "model": r.model, "hardware": r.hardware, "method": r.method or "plain", "measure": r.measure,
        "published": r.published, "predicted": c.predicted, "error_percent": round(100 * c.error, 1),
        "predicted_tau": c.tokens, "error_percent_from_it": _percent(c.error_from_tokens),
        "group": r.group, "used": "fitted" if r.fit else "checked", **workload, **drafted, "task": r.task,
        "runtime": r.runtime, "tau_basis": r.tau_basis, "source": r.source,
    }  # fmt: skip


def group_record(g: GroupErrors) -> dict[str, Any]:
    """Errors of a group of published measurements, in percent."""
    return {
        "group": g.group, "median_error_percent": round(100 * g.median, 1),
        "worst_error_percent": round(100 * g.worst, 1), "checked": g.checked, "fitted": g.fitted,
        "median_bias_percent": round(100 * g.bias, 1), "unseen": g.unseen,
        "unseen_median_percent": _percent(g.unseen_median), "goal_percent": _percent(g.goal),
    }  # fmt: skip


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def acceptance_records(fit: AcceptanceFit) -> list[dict[str, Any]]:
    """What acceptance was fitted to, its factors by depth and its terms."""
    tables = (("figures of", fit.papers), ("factor by depth of", fit.decay), ("term", fit.terms))
    return [
        {"what": what, "name": name, "value": round(value, 4)}
        for what, table in tables
        for name, value in table.items()
    ]


def unseen_records(figures: Mapping[str, int], errors: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Errors of the tokens per pass of papers that the fit has not seen, in percent; figures: of each paper."""
    return [
        {
            "paper": paper, "figures": figures[paper], "predicted": len(sizes),
            "median_error_percent": _percent(statistics.median(sizes) if sizes else None),
            "worst_error_percent": _percent(max(sizes, default=None)),
        }
        for paper, sizes in errors.items()
    ]  # fmt: skip


def table1_text(rows: Sequence[Table1Row]) -> list[dict[str, Any]]:
    """Rows of the paper's table in the paper's rounding, with our exact counts in the last two columns."""
    return [
        {
            "stage": r.stage, "layer": r.name, "OPs": _paper_number(r.ops), "bytes": _paper_number(r.bytes),
            "intensity": f"{r.intensity:.0f}" if r.intensity >= 10 else f"{r.intensity:.2f}".rstrip("0").rstrip("."),
            "performance": _paper_number(r.performance), "bound": r.bound,
            "exact OPs": f"{r.exact_ops:,.0f}", "exact bytes": f"{r.exact_bytes:,.0f}",
        }
        for r in rows
    ]  # fmt: skip


def _paper_number(value: float) -> str:
    """A whole number with a unit, as the paper prints it."""
    at = min(4, max(1, (len(f"{value:.0f}") - 1) // 3))
    return f"{value / 1000**at:.0f}{' KMGT'[at]}"


def load_record(c: LoadComparison) -> dict[str, Any]:
    """One rate of a simulated load: without drafts, and with them."""
    record: dict[str, Any] = {
        "rate": c.plain.rate, "speedup": c.speedup,
        "mean_latency": c.plain.mean_latency, "drafted_mean_latency": c.drafted.mean_latency,
        "goodput": c.plain.goodput, "drafted_goodput": c.drafted.goodput,
    }  # fmt: skip
    for name in c.plain.percentiles:
        for at, percent in enumerate((50, 99)):
            record[f"{name}_p{percent}"] = c.plain.percentiles[name][at]
            record[f"drafted_{name}_p{percent}"] = c.drafted.percentiles[name][at]
    tokens = {"tokens_per_second": c.plain.tokens_per_second, "drafted_tokens_per_second": c.drafted.tokens_per_second}
    return record | tokens | {"mean_running": c.plain.mean_running}


def compared_load_record(c: ComparedLoad) -> dict[str, Any]:
    """A published ratio under load beside the simulated one."""
    return {
        "setting": c.setting.name, "rate": c.rate, "measure": c.setting.measure, "published": c.published,
        "predicted": c.predicted, "error_percent": 100 * c.error, "use": "fitted" if c.fit else "checked",
        "basis": c.setting.basis, "source": c.setting.source,
    }  # fmt: skip


def to_csv(records: Sequence[Record]) -> str:
    """Records as CSV with a header line; numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
