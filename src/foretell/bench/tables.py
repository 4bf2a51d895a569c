"""Results as tables for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from foretell.bench.compare import Comparison
from foretell.bench.step import StepReport


def step_tables(report: StepReport) -> list[Table]:
    """Times of a pass, batch throughput, and the promised ratios."""
    sizes = sorted({p.tokens for p in report.passes})
    place = f"{report.threads} threads" if report.device == "cpu" else report.device
    times = Table(title=f"one pass over n new tokens, {report.context} cached, {place}: median ms")
    times.add_column("competitor")
    for n in sizes:
        times.add_column(f"n={n}", justify="right")
    by_key = {(p.competitor, p.tokens): p.median_ms for p in report.passes}
    for name in dict.fromkeys(p.competitor for p in report.passes):
        times.add_row(name, *(f"{by_key[name, n]:.2f}" for n in sizes))
    tables = [times]
    if report.bandwidth is not None:
        tables.append(_bandwidth(report, report.bandwidth))
    if report.throughput:
        tables.append(_throughput(report))
    return [*tables, _figures(report)] if report.ratio_goals else tables


def _bandwidth(report: StepReport, bandwidth: float) -> Table:
    """How near each pass comes to reading its bytes at the memory's full speed."""
    table = Table(title=f"weights and cache over time, as a share of the measured {bandwidth / 1e9:.0f} GB/s")
    table.add_column("competitor")
    sizes = sorted({p.tokens for p in report.passes})
    for n in sizes:
        table.add_column(f"n={n}", justify="right")
    shares = {
        (p.competitor, p.tokens): p.bytes / (p.median_ms / 1e3) / bandwidth
        for p in report.passes
        if p.bytes is not None
    }
    for name in dict.fromkeys(competitor for competitor, _ in shares):
        table.add_row(name, *(f"{shares[name, n]:.0%}" for n in sizes))
    return table


def _throughput(report: StepReport) -> Table:
    table = Table(title="plain decoding of a batch, whole engine steps")
    for name in ("competitor", "rows", "tokens/s"):
        table.add_column(name, justify="left" if name == "competitor" else "right")
    for s in report.throughput:
        table.add_row(s.competitor, str(s.rows), f"{s.tokens_per_second:.1f}")
    return table


def _figures(report: StepReport) -> Table:
    table = Table(title="ratios (median over the rounds) and goals")
    for name in ("figure", "value", "goal", ""):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for f in report.ratio_goals:
        table.add_row(
            f.name,
            f"{f.value:.3f}",
            f"{'≤' if f.is_upper_bound else '≥'} {f.goal:g}",
            "met" if f.met else "[red]missed[/]",
        )
    return table


def comparison_table(rows: Sequence[Comparison], names: tuple[str, str]) -> Table:
    """Both values, the ratio and its interval."""
    table = Table(title=f"A: {names[0]}   B: {names[1]}")
    table.add_column("competitor", no_wrap=True)
    for name in ("category", "figure", "A", "B", "B/A", "95 %", "n", "B is"):
        table.add_column(
            name, justify="left" if name in ("category", "figure", "B is") else "right", no_wrap=name != "category"
        )
    for r in rows:
        interval = f"{r.low:.2f}–{r.high:.2f}"
        table.add_row(
            r.competitor,
            r.category,
            r.metric,
            f"{r.a:.2f}",
            f"{r.b:.2f}",
            f"{r.ratio:.3f}",
            interval,
            str(r.questions),
            r.verdict,
        )
    return table
