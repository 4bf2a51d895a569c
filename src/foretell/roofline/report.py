"""Tables and sentences for the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foretell.roofline.analysis import Analysis
from foretell.roofline.calibrate import PredictionCheck
from foretell.roofline.cost import scalar
from foretell.roofline.model_variants import ModelVariant
from foretell.roofline.offload import OffloadResult
from foretell.roofline.plan import SpeculationPlan
from foretell.roofline.records import Record

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


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


def memory_warning(a: Analysis, offload: OffloadResult | None = None) -> str | None:
    """A sentence if the workload does not fit in memory."""
    if a.hardware.capacity is None or (a.fits if offload is None else offload.resident <= a.hardware.capacity):
        return None
    need = format_number(scalar(a.memory.total) if offload is None else offload.resident, "B")
    largest = (offload or a).largest_batch
    remedy = f"the largest batch that fits is {largest}"
    if not largest:
        remedy = "not even a batch of 1 fits: use fewer bits, more devices or offloading"
    each = " on each device" if a.workload.devices > 1 else ""
    capacity = format_number(a.hardware.capacity, "B")
    return f"{a.model.name} does not fit: it needs {need}{each} and {a.hardware.title} has {capacity}; {remedy}"


def offload_text(offload: OffloadResult) -> str:
    """Time and traffic under offloading, in one line."""
    fetched, left = format_number(offload.fetched, "B"), format_number(offload.resident, "B")
    time = f"{format_seconds(offload.seconds)}, bound by {offload.bound}"
    sizes = f"; largest batch {offload.largest_batch}, longest context {offload.longest_context}"
    sizes = "" if offload.largest_batch is None else sizes
    return f"offloaded  {time}; {fetched} fetched, {left} left on the device{sizes}"


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
    for name in ("OPs", "bytes", "OPs/byte", "attainable", "time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    colour = {"memory": "cyan", "compute": "yellow", "link": "magenta"}
    for each in a.op_costs:
        cost = each.cost
        moved = scalar(cost.link) if each.bound == "link" else scalar(cost.bytes)
        table.add_row(
            each.group, f"{each.count:g}", each.op.name, each.op.shape, format_number(scalar(cost.ops)),
            format_number(moved, "B"), f"{each.intensity:.3g}", format_number(each.attainable, "OP/s"),
            format_seconds(scalar(cost.seconds)), f"{each.count * scalar(cost.seconds) / a.seconds:.1%}",
            f"[{colour[each.bound]}]{each.bound}[/]",
        )  # fmt: skip
    return table


OPERATIONS_LEGEND = (
    "time: of one of the × operations, that of the embedding with what the runtime adds to a pass; share: of all × in "
    "the whole time"
)
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
        used = g.is_used
        speedup = f"[{'green' if g.speedup > 1 else 'dim'}]{g.speedup:.2f}×[/]"
        if not used and g is not plan.baseline:
            speedup = "[dim]no gain[/]"
        fits = "" if plan.fits.get(g.profile.name) is not False else " (does not fit)"
        table.add_row(
            g.profile.name + fits,
            f"{g.nodes - 1} × {g.depth}" if g.nodes > 1 else "-",
            f"{g.tokens_per_pass:.2f}", format_seconds(g.pass_seconds),
            format_seconds(g.draft_seconds) if g.draft_seconds else "-", f"{g.break_even_tokens:.2f}" if used else "-",
            speedup, f"{g.range[0]:.2f}-{g.range[1]:.2f}" if used else "-",
            f"{g.goodput:.4g}", format_number(g.bytes_per_token, "B"), format_number(g.ops_per_token), g.profile.basis,
        )  # fmt: skip
    return table


PLAN_OPTIONAL = ("acceptance", "OPs/token", "bytes/token", "draft", "range", "tree", "pass", "tokens/s")
"""Columns that a narrow terminal omits, first to last."""
PLAN_LEGEND = (
    "tree: drafted nodes × depth; pass: time of the target's pass over the tree; draft: time of drafting, a step; "
    "needs: tokens per pass from which the method is faster than plain decoding (autoregressive); range: of the "
    "speed-up; acceptance: where it comes from"
)


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


def check_summary(dtype: str, checks: Sequence[PredictionCheck]) -> str:
    """Median and worst error in one line."""
    errors = sorted(abs(c.error) for c in checks)
    return f"{dtype}: median error {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%} over {len(errors)} passes"


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
