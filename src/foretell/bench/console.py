"""Result tables in the terminal."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from foretell.bench.compare import Comparison
from foretell.bench.report import REGRET, category_table, regret_table
from foretell.bench.schema import BenchResults, CompetitorResult
from foretell.bench.step import StepReport
from foretell.bench.text_table import TextTable


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str | Text]], texts: int = 1) -> None:
    """Print a table whose first `texts` columns are text. Cells wrap between words only: where the words of all columns
    do not fit the terminal, further tables have the columns that are left.
    """
    console, columns = Console(), list(zip(header, *rows, strict=True))
    words = [max(cell_len(word) for cell in column for word in str(cell).split(" ")) for column in columns]
    whole = [max(cell_len(str(cell)) for cell in column) for column in columns]
    left = list(range(texts, len(columns)))
    while left:
        # Padding and rule take three characters a column; the outer edges have no padding.
        shown, room = list(range(texts)), console.width + 1 - sum(words[:texts]) - 3 * texts
        while left and (len(shown) == texts or words[left[0]] + 3 <= room):
            room -= words[left[0]] + 3
            shown.append(left.pop(0))
        table = Table(title=title, pad_edge=False)
        for i in shown:
            more = min(room, whole[i] - words[i])
            room -= more
            justify: JustifyMethod = "left" if i < texts else "right"
            table.add_column(header[i], justify=justify, overflow="fold", width=max(1, words[i] + more))
        for row in rows:
            table.add_row(*(row[i] for i in shown))
        console.print(table)


def print_sections(sections: Mapping[str, TextTable]) -> None:
    """Print titled tables; their first column is text."""
    for title, section in sections.items():
        _print_table(title, section.header, section.texts())


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _shown_name(competitor: CompetitorResult) -> str:
    return competitor.name + ("" if competitor.lossless else " (lossy)")


def print_summary(results: BenchResults) -> None:
    """Print means over the categories, and the regret of the default method."""
    peers, rows = [c.name for c in results.competitors if c.peer], list[list[str]]()
    for c in results.competitors:
        m = c.category_means
        values = [_format(v) for v in (m.tokens_per_pass, m.tokens_per_second, m.speedup)]
        rows.append([_shown_name(c), *values, f"{c.identical}/{c.compared}" if c.compared else "–"])
    header = "competitor", "tokens per pass", "tokens/s", "speed-up", "identical"
    _print_table(f"{results.settings.tasks}: means over the categories", header, rows)
    if peers:
        rows = [
            [_shown_name(c), *(_format(c.category_means.over_peers.get(p)) for p in peers)]
            for c in results.competitors
            if not c.peer
        ]
        _print_table("tokens/s over each peer", ["competitor", *peers], rows)
    if (regret := regret_table(results)).rows:
        print_sections({REGRET: regret})


def print_replay(results: BenchResults) -> None:
    """Print tokens per pass by category."""
    categories, rows = category_table(results, lambda m: m.tokens_per_pass, False), list[list[str]]()
    for row, c in zip(categories.rows, results.competitors, strict=True):
        values = [*row[1:], c.category_means.tokens_per_pass, c.pooled.drafted_per_pass]
        rows.append([c.name, *(_format(v if isinstance(v, float) else None) for v in values)])
    title = f"tokens per pass on recorded {results.settings.tasks}"
    _print_table(title, [*categories.header, "mean", "drafted per pass"], rows)
    Console().print(
        "Lower bounds for methods that learn from the target's logits at rejected or probed nodes: recycling, "
        "lookahead, Jacobi.",
        style="dim",
    )


def print_step_report(report: StepReport) -> None:
    """Print times of a pass, bandwidth, batch throughput, and the ratios with their goals."""
    sizes = sorted({p.tokens for p in report.passes})
    header = ["competitor", *(f"n={n}" for n in sizes)]
    device = f"{report.threads} threads" if report.device == "cpu" else report.device
    title = f"one pass over n new tokens, {report.context} cached, {device}: median ms"
    passes = {(p.competitor, p.tokens): p for p in report.passes}
    names = list(dict.fromkeys(p.competitor for p in report.passes))
    _print_table(title, header, [[name, *(f"{passes[name, n].median_ms:.2f}" for n in sizes)] for name in names])
    if report.bandwidth is not None:
        title = f"weights and cache over time, as a share of the measured {report.bandwidth / 1e9:.0f} GB/s"
        speeds = {name: [passes[name, n].bytes_per_second for n in sizes] for name in names}
        known = [name for name in names if None not in speeds[name]]
        _print_table(title, header, [[n, *(f"{(s or 0.0) / report.bandwidth:.0%}" for s in speeds[n])] for n in known])
    if report.throughput:
        shown = [[t.competitor, str(t.rows), f"{t.tokens_per_second:.1f}"] for t in report.throughput]
        _print_table("plain decoding of a batch, whole engine steps", ["competitor", "rows", "tokens/s"], shown)
    if report.ratio_goals:
        goals: list[list[str | Text]] = [
            [
                g.name,
                f"{g.value:.3f}",
                f"{'≤' if g.is_upper_bound else '≥'}\u00a0{g.goal:g}",
                Text("met") if g.met else Text("missed", "red"),
            ]
            for g in report.ratio_goals
        ]
        _print_table("ratios (median over the rounds) and goals", ["ratio", "value", "goal", ""], goals)


def print_comparison(comparisons: Sequence[Comparison], names: tuple[str, str]) -> None:
    """Print both values, the ratio and its interval."""
    rows = [
        [
            c.competitor, c.category, c.metric, f"{c.a:.2f}", f"{c.b:.2f}", f"{c.ratio:.3f}",
            f"{c.low:.2f}–{c.high:.2f}", str(c.questions), c.verdict,
        ]
        for c in comparisons
    ]  # fmt: skip
    header = "competitor", "category", "metric", "A", "B", "B/A", "95 %", "n", "B is"
    _print_table(f"A: {names[0]}   B: {names[1]}", header, rows, texts=3)
