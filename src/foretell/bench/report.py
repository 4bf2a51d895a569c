"""Tables of the report, and the report as Markdown. The HTML report has the same tables."""

from collections.abc import Callable, Mapping
from itertools import zip_longest

from foretell.bench.schema import BenchResults, Metrics
from foretell.bench.text_table import Cell, TextTable
from foretell.bench.verdict import verdict
from foretell.catalogue import DEFAULT_METHOD

REGRET = f"Regret: speed that {DEFAULT_METHOD} has less than the fastest other lossless method"
"""Title of its table."""
_DEPTHS = 8
"""Depths of the acceptance table."""


def render_markdown(results: BenchResults) -> str:
    """The whole report as Markdown."""
    return markdown_page(report_title(results), introduction(results), sections(results), results.definitions)


def markdown_page(title: str, conditions: str, tables: Mapping[str, TextTable], definitions: Mapping[str, str]) -> str:
    """A report of titled tables and definitions as Markdown."""
    parts = [f"# {title}\n\n{conditions}\n", *(f"## {name}\n\n{t.markdown()}" for name, t in tables.items())]
    return "\n".join([*parts, "## Definitions\n", "".join(f"- **{n}**: {text}\n" for n, text in definitions.items())])


def report_title(results: BenchResults) -> str:
    """Title of the report."""
    return f"Decoding methods on {results.settings.model}"


def introduction(results: BenchResults) -> str:
    """What the run advises; settings and machine."""
    s, repeats = results.settings, results.repeats
    return (
        f"{verdict(results)} Measured: {s.tasks}, at most {s.max_new_tokens} new tokens, "
        f"temperature {s.temperature:g}, "
        f"{repeats} repeat{'s' * (repeats > 1)}, {s.threads} thread{'s' * (s.threads > 1)}, "
        f"{device_name(results)}, {results.created}."
    )


def device_name(results: BenchResults) -> str:
    """The GPU, or else the processor with the instructions of the kernels."""
    machine = results.machine
    kernels = f" ({machine['kernels']})" if "kernels" in machine else ""
    return machine.get("gpu") or machine.get("processor", "unknown processor") + kernels


def sections(results: BenchResults) -> dict[str, TextTable]:
    """Tables by title, without empty ones."""
    peers = [c.name for c in results.competitors if c.peer]
    tables = {
        "All categories": summary_table(results),
        "Speed-up over our own plain decoding, by category": category_table(results, lambda m: m.speedup, True),
        REGRET: regret_table(results),
        **{f"Speed over {p}, by category": category_table(results, _over_peer(p), False) for p in peers},
        "Tokens per pass, by category": category_table(results, lambda m: m.tokens_per_pass, False),
        "Acceptance by depth, conditional / cumulative": acceptance_table(results),
        "Time": time_table(results),
        "Metrics of Spec-Bench": spec_bench_table(results),
        "Answers that differ from plain decoding": divergence_table(results),
        "Fidelity loss of lossy methods": fidelity_table(results),
        "Questions without an answer": error_table(results),
    }
    return {name: table for name, table in tables.items() if table.rows}


def _over_peer(peer: str) -> Callable[[Metrics], float | None]:
    return lambda m: m.over_peers.get(peer)


def summary_table(results: BenchResults) -> TextTable:
    """Means over the categories, identical answers and peak memory of every competitor."""
    peers = [c.name for c in results.competitors if c.peer]
    rows: list[list[Cell]] = [
        [
            c.name + ("" if c.lossless else " (lossy)"),
            c.category_means.tokens_per_pass,
            c.category_means.tokens_per_second,
            c.category_means.speedup,
            *(c.category_means.over_peers.get(p) for p in peers),
            f"{c.identical}/{c.compared}" if c.compared else None,
            None if c.peak_memory_bytes is None else round(c.peak_memory_bytes / 1e6),
        ]
        for c in results.competitors
    ]
    over = [f"over {p}" for p in peers]
    return TextTable(
        ["competitor", "tokens per pass", "tokens/s", "speed-up", *over, "identical", "peak memory, MB"], rows
    )


def category_table(results: BenchResults, metric: Callable[[Metrics], float | None], peers: bool) -> TextTable:
    """A metric by competitor and category; `peers`: include other runtimes."""
    shown = [c for c in results.competitors if peers or not c.peer]
    names = list(dict.fromkeys(n for c in shown for n in c.categories))
    rows: list[list[Cell]] = [
        [c.name, *(metric(c.categories[n]) if n in c.categories else None for n in names)] for c in shown
    ]
    return TextTable(["competitor", *names], rows)


def regret_table(results: BenchResults) -> TextTable:
    """The speed-up of the default method in each category, and that of the fastest of the other lossless methods,
    plain decoding among them; negative: none was as fast.
    """
    own, rows = [c for c in results.competitors if not c.peer], list[list[Cell]]()
    for c in own:
        method, _, precision = c.name.partition("/")
        if method != DEFAULT_METHOD:
            continue
        others = [o for o in own if o.lossless and o is not c and o.name.rpartition("/")[2] == precision]
        for category, metrics in c.categories.items():
            speeds = {o.name: o.categories[category].speedup or 0.0 for o in others if category in o.categories}
            best = max(speeds, key=lambda name: speeds[name], default="")
            if metrics.speedup and speeds.get(best):
                regret = f"{1 - metrics.speedup / speeds[best]:.1%}"
                rows.append([category, precision, metrics.speedup, best.partition("/")[0], speeds[best], regret])
    return TextTable(["category", "precision", "speed-up", "fastest other", "its speed-up", "regret"], rows)


def acceptance_table(results: BenchResults) -> TextTable:
    """Acceptance by depth of the methods that draft."""
    drafting = [c for c in results.competitors if c.pooled.acceptance_conditional]
    depth = min(_DEPTHS, max((len(c.pooled.acceptance_conditional) for c in drafting), default=0))

    def cells(m: Metrics) -> list[str]:
        pairs = zip_longest(m.acceptance_conditional, m.acceptance_cumulative, fillvalue=0.0)
        shown = [f"{conditional:.2f} / {cumulative:.2f}" for conditional, cumulative in pairs][:depth]
        return shown + [""] * (depth - len(shown))

    rows: list[list[Cell]] = [
        [c.name, c.pooled.accepted_per_pass, c.pooled.drafted_per_pass, *cells(c.pooled)] for c in drafting
    ]
    return TextTable(["competitor", "without bonus", "drafted per pass", *(str(d) for d in range(1, depth + 1))], rows)


def time_table(results: BenchResults) -> TextTable:
    """Shares of drafting and verifying, prefill, and inter-token times."""
    header = [
        "competitor",
        "draft",
        "verify",
        "other",
        "prefill, s",
        "p50, ms/token",
        "p95, ms/token",
        "p95 gap, ms",
        "end to end, tokens/s",
    ]

    def share(value: float | None) -> str | None:
        return None if value is None else f"{value:.1%}"

    def row(name: str, m: Metrics) -> list[Cell]:
        shares = [share(m.draft_share), share(m.verify_share), share(m.other_share)]
        waits = [m.prefill_seconds, m.inter_token_p50_ms, m.inter_token_p95_ms, m.gap_p95_ms]
        return [name, *shares, *waits, m.end_to_end_tokens_per_second]

    return TextTable(header, [row(c.name, c.pooled) for c in results.competitors if c.pooled.tokens_per_second])


def spec_bench_table(results: BenchResults) -> TextTable:
    """#MAT and speed-ups as Spec-Bench computes them."""
    groups = list(dict.fromkeys(g for c in results.competitors for g in c.spec_bench.speedup))
    rows: list[list[Cell]] = [
        [
            c.name,
            *(c.spec_bench.speedup.get(g) for g in groups),
            c.spec_bench.mean_accepted_tokens,
            c.spec_bench.overall,
        ]
        for c in results.competitors
    ]
    return TextTable(["competitor", *groups, "#MAT", "overall"], rows if groups else [])


def divergence_table(results: BenchResults) -> TextTable:
    """First tokens in which our answers differ from those of plain decoding."""
    divergences = [(c.name, d) for c in results.competitors if not c.peer for d in c.divergences]
    rows: list[list[Cell]] = [[name, d.question, d.turn + 1, d.position, d.margin] for name, d in divergences]
    return TextTable(["competitor", "question", "turn", "at token", "margin, logits"], rows, digits=4)


def fidelity_table(results: BenchResults) -> TextTable:
    """Fidelity loss of lossy methods."""
    losses = [(c.name, c.fidelity) for c in results.competitors if c.fidelity is not None]
    rows: list[list[Cell]] = [[name, f.kl, f.total_variation, f.changed] for name, f in losses]
    return TextTable(["competitor", "KL, nats", "total variation", "changed"], rows, digits=4)


def error_table(results: BenchResults) -> TextTable:
    """Questions without an answer, and why."""
    rows: list[list[Cell]] = [[c.name, q, why] for c in results.competitors for q, why in c.errors.items()]
    return TextTable(["competitor", "question", "why"], rows)
