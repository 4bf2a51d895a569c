"""Result tables in the terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from foretell.bench.compare import Comparison
from foretell.bench.report import category_table
from foretell.bench.schema import BenchResults
from foretell.bench.step import StepReport
from foretell.bench.text_table import TextTable


def _table(title: str, text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    """An empty table; columns of text come first."""
    # Without the space at the edges the default run fits a terminal of 80 columns with all headings whole.
    table = Table(title=title, pad_edge=False)
    for i, name in enumerate(text_columns):
        table.add_column(name, no_wrap=not i)
    for name in number_columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def print_sections(sections: Mapping[str, TextTable]) -> None:
    """Print titled tables; their first column is text."""
    console = Console()
    for title, section in sections.items():
        table = _table(title, section.header[:1], section.header[1:])
        for row in section.texts():
            table.add_row(*row)
        console.print(table)


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def print_summary(results: BenchResults) -> None:
    """Print means over the categories."""
    console, peers = Console(), [c.name for c in results.competitors if c.peer]
    table = _table(
        f"{results.settings.tasks}: means over the categories",
        ["competitor"],
        ["tokens per pass", "tokens/s", "speed-up", "identical"],
    )
    for c in results.competitors:
        m = c.category_means
        identical = f"{c.identical}/{c.compared}" if c.compared else "–"
        values = [_format(v) for v in (m.tokens_per_pass, m.tokens_per_second, m.speedup)]
        table.add_row(c.name + ("" if c.lossless else " (lossy)"), *values, identical)
    console.print(table)
    if peers:
        table = _table("tokens/s over each peer", ["competitor"], peers)
        for c in results.competitors:
            if not c.peer:
                values = [_format(c.category_means.over_peers.get(p)) for p in peers]
                table.add_row(c.name + ("" if c.lossless else " (lossy)"), *values)
        console.print(table)


def print_replay(results: BenchResults) -> None:
    """Print tokens per pass by category."""
    categories = category_table(results, lambda m: m.tokens_per_pass, False)
    title = f"tokens per pass on recorded {results.settings.tasks}"
    table = _table(title, categories.header[:1], [*categories.header[1:], "mean", "drafted per pass"])
    for row, c in zip(categories.rows, results.competitors, strict=True):
        values = [*row[1:], c.category_means.tokens_per_pass, c.pooled.drafted_per_pass]
        table.add_row(c.name, *(_format(v if isinstance(v, float) else None) for v in values))
    console = Console()
    console.print(table)
    console.print(
        "Lower bounds for methods that learn from the target's logits at rejected or probed nodes: recycling, "
        "lookahead, Jacobi.",
        style="dim",
    )


def print_step_report(report: StepReport) -> None:
    """Print times of a pass, bandwidth, batch throughput, and the ratios with their goals."""
    console = Console()
    sizes = sorted({p.tokens for p in report.passes})
    sized = [f"n={n}" for n in sizes]
    device = f"{report.threads} threads" if report.device == "cpu" else report.device
    title = f"one pass over n new tokens, {report.context} cached, {device}: median ms"
    times = _table(title, ["competitor"], sized)
    passes = {(p.competitor, p.tokens): p for p in report.passes}
    names = list(dict.fromkeys(p.competitor for p in report.passes))
    for name in names:
        times.add_row(name, *(f"{passes[name, n].median_ms:.2f}" for n in sizes))
    console.print(times)
    if report.bandwidth is not None:
        title = f"weights and cache over time, as a share of the measured {report.bandwidth / 1e9:.0f} GB/s"
        shares = _table(title, ["competitor"], sized)
        for name in names:
            speeds = [passes[name, n].bytes_per_second for n in sizes]
            if None not in speeds:
                shares.add_row(name, *(f"{(s or 0.0) / report.bandwidth:.0%}" for s in speeds))
        console.print(shares)
    if report.throughput:
        table = _table("plain decoding of a batch, whole engine steps", ["competitor"], ["rows", "tokens/s"])
        for t in report.throughput:
            table.add_row(t.competitor, str(t.rows), f"{t.tokens_per_second:.1f}")
        console.print(table)
    if report.ratio_goals:
        table = _table("ratios (median over the rounds) and goals", ["ratio"], ["value", "goal", ""])
        for g in report.ratio_goals:
            goal = f"{'≤' if g.is_upper_bound else '≥'} {g.goal:g}"
            table.add_row(g.name, f"{g.value:.3f}", goal, "met" if g.met else "[red]missed[/]")
        console.print(table)


def print_comparison(comparisons: Sequence[Comparison], names: tuple[str, str]) -> None:
    """Print both values, the ratio and its interval."""
    title = f"A: {names[0]}   B: {names[1]}"
    table = _table(title, ["competitor", "category", "metric"], ["A", "B", "B/A", "95 %", "n", "B is"])
    for c in comparisons:
        values = f"{c.a:.2f}", f"{c.b:.2f}", f"{c.ratio:.3f}", f"{c.low:.2f}–{c.high:.2f}", str(c.questions), c.verdict
        table.add_row(c.competitor, c.category, c.metric, *values)
    Console().print(table)
