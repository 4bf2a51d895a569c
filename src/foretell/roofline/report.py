"""Answers as text, JSON and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foretell.roofline.analysis import Analysis, Model
from foretell.roofline.calibrate import Check
from foretell.roofline.cost import Line, value
from foretell.roofline.hardware import Hardware
from foretell.roofline.model_variants import Change
from foretell.roofline.offload import Offloaded
from foretell.roofline.paper.table1 import Row
from foretell.roofline.plan import Plan
from foretell.roofline.speculation import Gain
from foretell.roofline.sweep import Sweep

PREFIXES = ("", "k", "M", "G", "T", "P", "E")
Record = Mapping[str, Any]


def amount(number: float, unit: str = "") -> str:
    """A number with a decimal prefix, three significant digits."""
    at = 0
    while abs(number) >= 999.5 and at < len(PREFIXES) - 1:
        number, at = number / 1000, at + 1
    return f"{number:.3g} {PREFIXES[at]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        if seconds * factor >= 1 or unit == "ns":
            return f"{seconds * factor:.4g} {unit}"
    return "0 s"


def line_record(line: Line) -> dict[str, Any]:
    """Figures of an operation in one layer."""
    c = line.cost
    return {
        "block": line.block, "count": line.count, "operation": line.op.name, "shape": line.op.shape,
        "kind": line.op.kind,
        "ops": value(c.ops), "bytes": value(c.bytes), "weights": value(c.weights), "read": value(c.read),
        "write": value(c.write), "kv_read": value(c.kv_read), "kv_write": value(c.kv_write), "wire": value(c.wire),
        "intensity": line.intensity, "attainable": line.attainable, "bound": line.bound, "seconds": value(c.seconds),
    }  # fmt: skip


def record(a: Analysis) -> dict[str, Any]:
    """The whole answer, for `--json`."""
    s, t, m = a.setting, a.total, a.memory
    return {
        "model": a.model.name,
        "hardware": a.hardware.name,
        "setting": {
            "stage": s.stage, "batch": s.batch, "context": s.context, "tokens": s.tokens, "chunk": s.chunk,
            "generate": s.generate, "weights": s.weights.name, "activations": s.activations.name, "kv": s.kv.name,
            "fusion": s.fusion, "devices": s.devices, "square": s.square,
        },
        "total": {
            "seconds": a.seconds, "tokens": a.tokens, "tokens_per_second": a.tokens / a.seconds, "ops": value(t.ops),
            "bytes": value(t.bytes), "weights": value(t.weights), "read": value(t.read), "write": value(t.write),
            "kv_read": value(t.kv_read), "kv_write": value(t.kv_write), "wire": value(t.wire),
        },
        "memory": {
            "weights": value(m.weights), "kv": value(m.kv), "activations": value(m.activations),
            "total": value(m.total),
            "capacity": a.hardware.capacity, "fits": a.fits, "largest_batch": a.largest_batch,
            "longest_context": a.longest_context,
        },
        "operations": [line_record(line) for line in a.lines],
    }  # fmt: skip


def too_big(a: Analysis, away: Offloaded | None = None) -> str | None:
    """The sentence that says a setting does not fit, if it does not."""
    if a.hardware.capacity is None or (a.fits if away is None else away.resident <= a.hardware.capacity):
        return None
    need = amount(value(a.memory.total) if away is None else away.resident, "B")
    cure = f"the largest batch that fits is {a.largest_batch}"
    if not a.largest_batch:
        cure = "not even a batch of 1 fits: use fewer bits, more devices (--devices) or --offload"
    each = " on each device" if a.setting.devices > 1 else ""
    return f"{a.model.name} does not fit: it needs {need}{each} and {a.hardware.title} has {amount(a.hardware.capacity, 'B')}; {cure}"


def offload_text(away: Offloaded) -> str:
    """Time and traffic with data in a tier."""
    fetched, left = amount(away.fetched, "B"), amount(away.resident, "B")
    return f"offloaded  {duration(away.seconds)}, bound by {away.bound}; {fetched} fetched, {left} left on the device"


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


def fitted(table: Table, width: int, dispensable: Sequence[str]) -> Table:
    """The table without as many `dispensable` columns, in this order, as `width` demands; no figure is ever cut.

    Says what it left out.
    """
    unlimited = Console(width=10_000)
    left_out = list[str]()
    for name in dispensable:
        if unlimited.measure(table).maximum <= width:
            break
        table.columns = [c for c in table.columns if c.header != name]
        left_out.append(name)
    if left_out:
        table.caption = f"left out to fit {width} columns: {', '.join(left_out)}; --csv has all"
        table.caption_justify = "left"
    return table


def operations_table(a: Analysis) -> Table:
    """Every operation of one layer of each kind."""
    table = new_table(f"{a.model.name} on {a.hardware.title}, {a.setting.stage}")
    for name in ("block", "×", "operation", "shape"):
        table.add_column(name, justify="right" if name == "×" else "left", no_wrap=True)
    for name in ("OPs", "bytes", "OPs/byte", "attainable", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    colour = {"memory": "cyan", "compute": "yellow", "link": "magenta"}
    for line in a.lines:
        c = line.cost
        moved = value(c.wire) if line.bound == "link" else value(c.bytes)
        table.add_row(
            line.block, f"{line.count:g}", line.op.name, line.op.shape, amount(value(c.ops)), amount(moved, "B"),
            f"{line.intensity:.3g}", amount(line.attainable, "OP/s"), duration(value(c.seconds)),
            f"[{colour[line.bound]}]{line.bound}[/]",
        )  # fmt: skip
    return table


OPERATIONS_DISPENSABLE = ("attainable", "OPs/byte", "shape", "OPs", "bytes")
"""Columns of `operations_table` that go first where a terminal is narrow."""


def totals_table(a: Analysis) -> Table:
    """Totals of the setting, memory and limits."""
    table = Table(show_header=False, box=None, pad_edge=False)
    t, m = a.total, a.memory
    rows = [
        ("time", duration(a.seconds)),
        ("tokens/s", f"{a.tokens / a.seconds:.4g}"),
        ("OPs", amount(value(t.ops))),
        (
            "bytes",
            f"{amount(value(t.bytes), 'B')} = weights {amount(value(t.weights), 'B')} + activations "
            f"{amount(value(t.read + t.write), 'B')}"
            f" + cache {amount(value(t.kv_read + t.kv_write), 'B')}",
        ),
        (
            "memory",
            f"{amount(value(m.total), 'B')} = weights {amount(value(m.weights), 'B')} + cache "
            f"{amount(value(m.kv), 'B')}"
            f" + activations {amount(value(m.activations), 'B')}",
        ),
    ]
    if a.setting.devices > 1:
        rows.append(("between devices", amount(value(t.wire), "B")))
    if a.hardware.capacity is not None:
        rows.append(
            (
                "capacity",
                f"{amount(a.hardware.capacity, 'B')}: largest batch {a.largest_batch}, longest context "
                f"{a.longest_context}",
            )
        )
    for name, text in rows:
        table.add_row(f"[bold]{name}[/]", text)
    return table


def gain_record(gain: Gain, fits: bool | None) -> dict[str, Any]:
    """Figures of a method."""
    return {
        "method": gain.method.name, "shape": gain.method.shape, "nodes": gain.nodes, "depth": gain.depth,
        "tokens_per_pass": gain.tokens,
        "pass_seconds": gain.pass_seconds, "draft_seconds": gain.draft_seconds, "break_even_tokens": gain.break_even,
        "speedup": gain.speedup, "goodput": gain.goodput, "bytes_per_token": gain.bytes, "ops_per_token": gain.ops,
        "fits": fits, "basis": gain.method.basis, "source": gain.method.acceptance.source,
    }  # fmt: skip


def plan_records(plan: Plan) -> list[dict[str, Any]]:
    """All methods, plain decoding last."""
    return [gain_record(g, plan.fits[g.method.name]) for g in plan.gains] + [gain_record(plan.plain, None)]


def plan_record(plan: Plan, changes: Sequence[Change]) -> dict[str, Any]:
    """The whole ranking, for `--json`."""
    cheaper = [
        {"change": c.name, "title": c.title, "seconds": c.seconds, "speedup": c.speedup, "bytes": c.bytes, "ops": c.ops}
        for c in changes
    ]
    return {"advice": plan.advice, "methods": plan_records(plan), "refused": dict(plan.refused), "changes": cheaper}


def model_record(model: Model, source: str) -> dict[str, Any]:
    """A model in the list."""
    c, network = model.config, model.network("flash", False)
    return {
        "name": model.name, "parameters": network.parameters, "layers": c.layers, "hidden": c.hidden, "heads": c.heads,
        "kv_heads": c.kv_heads, "vocab": c.vocab, "cache_per_token": sum(b.count * b.kv for b in network.blocks),
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


def plan_table(plan: Plan) -> Table:
    """Methods ranked, with the bytes and OPs per token that explain the order."""
    table = new_table()
    table.add_column("method", no_wrap=True)
    for name in ("tree", "tokens/pass", "pass", "draft", "needs", "speed-up", "tokens/s", "bytes/token", "OPs/token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("acceptance", no_wrap=True)
    for g in (*plan.gains, plan.plain):
        used = g.nodes > 1
        fits = "" if plan.fits.get(g.method.name) is not False else " (does not fit)"
        table.add_row(
            g.method.name + fits,
            f"{g.nodes - 1} × {g.depth}" if used else "-", f"{g.tokens:.2f}", duration(g.pass_seconds),
            duration(g.draft_seconds) if g.draft_seconds else "-", f"{g.break_even:.2f}" if used else "-",
            f"[{'green' if g.speedup > 1 else 'dim'}]{g.speedup:.2f}×[/]" if used or g is plan.plain else "[dim]do "
                                                                                                          "not[/]",
            f"{g.goodput:.4g}", amount(g.bytes, "B"), amount(g.ops), g.method.basis,
        )  # fmt: skip
    return table


PLAN_DISPENSABLE = ("acceptance", "OPs/token", "bytes/token", "draft", "tree", "pass", "tokens/s")
"""Columns of `plan_table` that go first where a terminal is narrow."""


def changes_table(changes: Sequence[Change]) -> Table:
    """Cheaper passes, best first."""
    table = new_table("Cheaper passes (the text changes)")
    table.add_column("change")
    for name in ("pass", "speed-up", "bytes", "OPs"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in changes:
        table.add_row(c.title, duration(c.seconds), f"{c.speedup:.2f}×", amount(c.bytes, "B"), amount(c.ops))
    return table


def sweep_records(found: Sweep, capacity: float | None) -> list[dict[str, Any]]:
    """One record per setting."""
    records = []
    for at, values in enumerate(found.settings()):
        row: dict[str, Any] = dict(zip(found.axes, values, strict=True))
        row |= {
            "seconds": float(found.seconds[at]), "tokens_per_second": float(found.tokens[at] / found.seconds[at]),
            "ops": float(found.ops[at]), "bytes": float(found.bytes[at]), "memory": float(found.memory[at]),
            "fits": None if capacity is None else bool(found.memory[at] <= capacity),
        }  # fmt: skip
        records.append(row)
    return records


def check_record(dtype: str, c: Check) -> dict[str, Any]:
    """A predicted and measured pass."""
    return {
        "dtype": dtype, "tokens": c.tokens, "context": c.context, "predicted_ms": 1e3 * c.predicted,
        "measured_ms": 1e3 * c.measured, "error_percent": 100 * c.error,
    }  # fmt: skip


def check_summary(dtype: str, checks: Sequence[Check]) -> str:
    """Median and worst error in one line."""
    errors = sorted(abs(c.error) for c in checks)
    return f"{dtype}: median error {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%} over {len(errors)} passes"


def table1_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The paper's table with our exact counts beside it."""
    return [
        {
            "stage": r.stage, "layer": r.name, "ops": r.ops, "bytes": r.bytes, "intensity": r.intensity,
            "performance": r.performance, "bound": r.bound, "exact_ops": r.exact_ops, "exact_bytes": r.exact_bytes,
        }
        for r in rows
    ]  # fmt: skip


def plain_table(records: Sequence[Record], width: int, title: str = "") -> Table:
    """Records as they are, numbers with prefixes; where `width` is short, the last columns go first."""
    table = new_table(title)
    for name, sample in records[0].items():
        table.add_column(name, justify="left" if isinstance(sample, str) else "right", no_wrap=True)
    for row in records:
        table.add_row(*(amount(v) if isinstance(v, float) else "" if v is None else str(v) for v in row.values()))
    return fitted(table, width, list(records[0])[:0:-1])


def to_csv(records: Sequence[Record]) -> str:
    """Records as CSV with a header line; numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
