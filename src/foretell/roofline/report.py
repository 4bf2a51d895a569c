"""Results as tables, JSON and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foretell.roofline.analysis import Analysis, AnalyzedModel
from foretell.roofline.arrivals import LoadComparison
from foretell.roofline.calibrate import PredictionCheck
from foretell.roofline.cost import CostBreakdown, OpCost, scalar
from foretell.roofline.hardware import Hardware
from foretell.roofline.measured import MeasuredRow
from foretell.roofline.model_variants import ModelVariant
from foretell.roofline.offload import OffloadResult
from foretell.roofline.paper.table1 import Table1Row
from foretell.roofline.plan import SpeculationPlan
from foretell.roofline.published import ComparedRow, GroupErrors
from foretell.roofline.published_loads import ComparedLoad
from foretell.roofline.runtime import Runtime, runtime_figures
from foretell.roofline.speculation import MethodEstimate
from foretell.roofline.sweep import SweepResult

PREFIXES = ("", "k", "M", "G", "T", "P", "E")
Record = Mapping[str, Any]


def format_number(number: float, unit: str = "") -> str:
    """A number with a decimal prefix, three significant digits."""
    at = 0
    while abs(number) >= 999.5 and at < len(PREFIXES) - 1:
        number, at = number / 1000, at + 1
    return f"{number:.3g} {PREFIXES[at]}{unit}".rstrip()


def format_seconds(seconds: float) -> str:
    """Seconds with a unit that keeps the number above 1."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        if seconds * factor >= 1 or unit == "ns":
            return f"{seconds * factor:.4g} {unit}"
    return "0 s"


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


def memory_warning(a: Analysis, offload: OffloadResult | None = None) -> str | None:
    """A sentence if the workload does not fit in memory."""
    if a.hardware.capacity is None or (a.fits if offload is None else offload.resident <= a.hardware.capacity):
        return None
    need = format_number(scalar(a.memory.total) if offload is None else offload.resident, "B")
    remedy = f"the largest batch that fits is {a.largest_batch}"
    if not a.largest_batch:
        remedy = "not even a batch of 1 fits: use fewer bits, more devices (--devices) or --offload"
    each = " on each device" if a.workload.devices > 1 else ""
    capacity = format_number(a.hardware.capacity, "B")
    return f"{a.model.name} does not fit: it needs {need}{each} and {a.hardware.title} has {capacity}; {remedy}"


def offload_text(offload: OffloadResult) -> str:
    """Time and traffic under offloading, in one line."""
    fetched, left = format_number(offload.fetched, "B"), format_number(offload.resident, "B")
    time = f"{format_seconds(offload.seconds)}, bound by {offload.bound}"
    return f"offloaded  {time}; {fetched} fetched, {left} left on the device"


def new_table(title: str = "") -> Table:
    """An empty table without vertical lines, so that more columns fit a terminal."""
    return Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def fit_width(table: Table, width: int, optional: Sequence[str]) -> Table:
    """The table without as many of the `optional` columns, in this order, as do not fit into `width`.

    The caption names the columns that were removed; no figure is truncated.
    """
    unlimited = Console(width=10_000)
    left_out = list[str]()
    for name in optional:
        if unlimited.measure(table).maximum <= width:
            break
        table.columns = [c for c in table.columns if c.header != name]
        left_out.append(name)
    if left_out:
        table.caption = f"left out to fit {width} columns: {', '.join(left_out)}; --csv has all"
        table.caption_justify = "left"
    return table


def operations_table(a: Analysis) -> Table:
    """Every operation of one layer of each group."""
    table = new_table(f"{a.model.name} on {a.hardware.title}, {a.workload.stage}")
    for name in ("group", "×", "operation", "shape"):
        table.add_column(name, justify="right" if name == "×" else "left", no_wrap=True)
    for name in ("OPs", "bytes", "OPs/byte", "attainable", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    colour = {"memory": "cyan", "compute": "yellow", "link": "magenta"}
    for each in a.op_costs:
        cost = each.cost
        moved = scalar(cost.link) if each.bound == "link" else scalar(cost.bytes)
        table.add_row(
            each.group, f"{each.count:g}", each.op.name, each.op.shape, format_number(scalar(cost.ops)),
            format_number(moved, "B"), f"{each.intensity:.3g}", format_number(each.attainable, "OP/s"),
            format_seconds(scalar(cost.seconds)), f"[{colour[each.bound]}]{each.bound}[/]",
        )  # fmt: skip
    return table


OPERATIONS_OPTIONAL = ("attainable", "OPs/byte", "shape", "OPs", "bytes")
"""Columns that a narrow terminal omits, first to last."""


def totals_table(a: Analysis) -> Table:
    """Totals of the workload, memory, and the largest sizes that fit."""
    table = Table(show_header=False, box=None, pad_edge=False)
    t, m = a.total, a.memory
    rows = [
        ("time", format_seconds(a.seconds)),
        ("tokens/s", f"{a.tokens / a.seconds:.4g}"),
        ("OPs", format_number(scalar(t.ops))),
        (
            "bytes",
            f"{format_number(scalar(t.bytes), 'B')} = weights {format_number(scalar(t.weights), 'B')} + activations "
            f"{format_number(scalar(t.read + t.write), 'B')}"
            f" + cache {format_number(scalar(t.kv_read + t.kv_write), 'B')}",
        ),
        (
            "memory",
            f"{format_number(scalar(m.total), 'B')} = weights {format_number(scalar(m.weights), 'B')} + cache "
            f"{format_number(scalar(m.kv), 'B')}"
            f" + activations {format_number(scalar(m.activations), 'B')}",
        ),
    ]
    if a.workload.devices > 1:
        rows.append(("between devices", format_number(scalar(t.link), "B")))
    if a.hardware.capacity is not None:
        rows.append(
            (
                "capacity",
                f"{format_number(a.hardware.capacity, 'B')}: largest batch {a.largest_batch}, longest context "
                f"{a.longest_context}",
            )
        )
    for name, text in rows:
        table.add_row(f"[bold]{name}[/]", text)
    return table


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


def plan_table(plan: SpeculationPlan) -> Table:
    """The ranked methods."""
    table = new_table()
    table.add_column("method", no_wrap=True)
    for name in (
        "tree",
        "tokens/pass",
        "pass",
        "draft",
        "needs",
        "speed-up",
        "range",
        "tokens/s",
        "bytes/token",
        "OPs/token",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("acceptance", no_wrap=True)
    for g in (*plan.estimates, plan.baseline):
        used = g.nodes > 1
        speedup = f"[{'green' if g.speedup > 1 else 'dim'}]{g.speedup:.2f}×[/]"
        if not used and g is not plan.baseline:
            speedup = "[dim]do not[/]"
        fits = "" if plan.fits.get(g.profile.name) is not False else " (does not fit)"
        table.add_row(
            g.profile.name + fits,
            f"{g.nodes - 1} × {g.depth}" if used else "-", f"{g.tokens_per_pass:.2f}", format_seconds(g.pass_seconds),
            format_seconds(g.draft_seconds) if g.draft_seconds else "-", f"{g.break_even_tokens:.2f}" if used else "-",
            speedup, f"{g.range[0]:.2f}-{g.range[1]:.2f}" if used else "-",
            f"{g.goodput:.4g}", format_number(g.bytes_per_token, "B"), format_number(g.ops_per_token), g.profile.basis,
        )  # fmt: skip
    return table


PLAN_OPTIONAL = ("acceptance", "OPs/token", "bytes/token", "draft", "range", "tree", "pass", "tokens/s")
"""Columns that a narrow terminal omits, first to last."""


def variants_table(variants: Sequence[ModelVariant]) -> Table:
    """Model variants, fastest first."""
    table = new_table("Variants of the model with cheaper passes (their output differs)")
    table.add_column("variant")
    for name in ("pass", "speed-up", "bytes", "OPs"):
        table.add_column(name, justify="right", no_wrap=True)
    for v in variants:
        table.add_row(
            v.title, format_seconds(v.seconds), f"{v.speedup:.2f}×", format_number(v.bytes, "B"), format_number(v.ops)
        )
    return table


def sweep_records(found: SweepResult, capacity: float | None) -> list[dict[str, Any]]:
    """One record per workload of a sweep."""
    records = []
    for at, values in enumerate(found.points()):
        row: dict[str, Any] = dict(zip(found.axes, values, strict=True))
        row |= {
            "seconds": float(found.seconds[at]), "tokens_per_second": float(found.tokens[at] / found.seconds[at]),
            "ops": float(found.ops[at]), "bytes": float(found.bytes[at]), "memory": float(found.memory[at]),
            "fits": None if capacity is None else bool(found.memory[at] <= capacity),
        }  # fmt: skip
        records.append(row)
    return records


def check_record(dtype: str, c: PredictionCheck) -> dict[str, Any]:
    """A predicted and measured pass."""
    return {
        "dtype": dtype, "tokens": c.tokens, "context": c.context, "predicted_ms": 1e3 * c.predicted,
        "measured_ms": 1e3 * c.measured, "error_percent": 100 * c.error,
    }  # fmt: skip


def check_summary(dtype: str, checks: Sequence[PredictionCheck]) -> str:
    """Median and worst error in one line."""
    errors = sorted(abs(c.error) for c in checks)
    return f"{dtype}: median error {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%} over {len(errors)} passes"


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
        "group": r.group, "model": r.model, "hardware": r.hardware, "method": r.method or "plain",
        "published": r.published, "predicted": c.predicted, "error_percent": round(100 * c.error, 1),
        "used": "fitted" if r.fit else "checked", "measure": r.measure, **workload, **drafted,
        "runtime": r.runtime, "tau_basis": r.tau_basis, "source": r.source,
    }  # fmt: skip


def group_record(g: GroupErrors) -> dict[str, Any]:
    """Errors of a group of published measurements, in percent."""
    return {
        "group": g.group, "checked": g.checked, "fitted": g.fitted, "median_error_percent": round(100 * g.median, 1),
        "worst_error_percent": round(100 * g.worst, 1), "median_bias_percent": round(100 * g.bias, 1),
    }  # fmt: skip


def runtime_record(runtime: Runtime) -> dict[str, Any]:
    """The figures of a runtime in the units of runtimes.toml."""
    return {"name": runtime.name} | runtime_figures(runtime)


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


def plain_table(records: Sequence[Record], width: int, title: str = "") -> Table:
    """Records as a table, numbers with prefixes; a narrow `width` omits the last columns."""
    table = new_table(title)
    for name, sample in records[0].items():
        table.add_column(name, justify="left" if isinstance(sample, str) else "right", no_wrap=True)
    for row in records:
        table.add_row(
            *(format_number(v) if isinstance(v, float) else "" if v is None else str(v) for v in row.values())
        )
    return fit_width(table, width, list(records[0])[:0:-1])


def to_csv(records: Sequence[Record]) -> str:
    """Records as CSV with a header line; numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
