"""Results as sections: the Markdown and the HTML report are made of the same ones."""

from collections.abc import Callable

from foretell.bench.schema import BenchResults, Metrics
from foretell.bench.text_table import Cell, Section, TextTable

_DEPTHS = 8
"""Depths of the acceptance table."""


def render_markdown(results: BenchResults) -> str:
    """The whole report as Markdown."""
    parts = [
        f"# {report_title(results)}\n\n{conditions(results)}\n",
        *(s.markdown() for s in sections(results)),
        "## What the figures mean\n",
    ]
    return "\n".join([*parts, "".join(f"- **{name}**: {text}\n" for name, text in results.definitions.items())])


def report_title(results: BenchResults) -> str:
    """What was measured."""
    return f"Decoding methods on {results.settings.model}"


def conditions(results: BenchResults) -> str:
    """Under which conditions."""
    s, repeats = results.settings, results.repeats
    return (
        f"{s.tasks}, at most {s.max_new_tokens} new tokens, temperature {s.temperature:g}, {repeats} "
        f"repeat{'s' * (repeats > 1)}, "
        f"{s.threads} thread{'s' * (s.threads > 1)}, {device_name(results)}, {results.created}."
    )


def device_name(results: BenchResults) -> str:
    """The device that ran the models."""
    return results.machine.get("gpu") or results.machine.get("processor", "unknown processor")


def sections(results: BenchResults) -> list[Section]:
    """Every table, those without content left out."""
    peers = [c.name for c in results.competitors if c.peer]
    found = [
        Section("All categories", summary_table(results)),
        Section(
            "Speed-up over our own plain decoding, by category", category_table(results, lambda f: f.speedup, True)
        ),
        *(Section(f"Speed over {p}, by category", category_table(results, _over(p), False)) for p in peers),
        Section("Tokens per pass, by category", category_table(results, lambda f: f.tokens_per_pass, False)),
        Section("Acceptance by depth, conditional / cumulative", acceptance_table(results)),
        Section("Where the time goes", time_table(results)),
        Section("Spec-Bench's own figures", spec_bench_table(results)),
        Section("Answers that differ from plain decoding", divergence_table(results)),
        Section("Price of the lossy methods", fidelity_table(results)),
        Section("Questions without an answer", error_table(results)),
    ]
    return [s for s in found if isinstance(s.body, str) or s.body.rows]


def _over(peer: str) -> Callable[[Metrics], float | None]:
    return lambda f: f.over_peers.get(peer)


def summary_table(results: BenchResults) -> TextTable:
    """One line per competitor: means over the categories, and identity."""
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


def category_table(results: BenchResults, figure: Callable[[Metrics], float | None], peers: bool) -> TextTable:
    """A figure of every competitor (`peers`: theirs too) and category."""
    shown = [c for c in results.competitors if peers or not c.peer]
    names = list(dict.fromkeys(n for c in shown for n in c.categories))
    rows: list[list[Cell]] = [
        [c.name, *(figure(c.categories[n]) if n in c.categories else None for n in names)] for c in shown
    ]
    return TextTable(["competitor", *names], rows)


def acceptance_table(results: BenchResults) -> TextTable:
    """Per depth, for methods that draft."""
    drafting = [c for c in results.competitors if c.pooled.acceptance_conditional]
    depth = min(_DEPTHS, max((len(c.pooled.acceptance_conditional) for c in drafting), default=0))

    def cells(f: Metrics) -> list[str]:
        reached = [*f.acceptance_cumulative, *[0.0] * len(f.acceptance_conditional)]
        shown = [f"{a:.2f} / {b:.2f}" for a, b in zip(f.acceptance_conditional, reached, strict=False)][:depth]
        return shown + [""] * (depth - len(shown))

    rows: list[list[Cell]] = [
        [c.name, c.pooled.accepted_per_pass, c.pooled.drafted_per_pass, *cells(c.pooled)] for c in drafting
    ]
    return TextTable(["competitor", "without bonus", "drafted per pass", *(str(d) for d in range(1, depth + 1))], rows)


def time_table(results: BenchResults) -> TextTable:
    """Draft, verify, other; prefill; inter-token times."""
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

    def row(name: str, f: Metrics) -> list[Cell]:
        shares = [share(f.draft_share), share(f.verify_share), share(f.other_share)]
        waits = [f.prefill_seconds, f.inter_token_p50_ms, f.inter_token_p95_ms, f.gap_p95_ms]
        return [name, *shares, *waits, f.end_to_end_tokens_per_second]

    return TextTable(header, [row(c.name, c.pooled) for c in results.competitors if c.pooled.tokens_per_second])


def spec_bench_table(results: BenchResults) -> TextTable:
    """#MAT and speed-ups its way."""
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
    """Answers of ours that left plain decoding's."""
    found = [(c.name, d) for c in results.competitors if not c.peer for d in c.divergences]
    rows: list[list[Cell]] = [[name, d.question, d.turn + 1, d.position, d.margin] for name, d in found]
    return TextTable(["competitor", "question", "turn", "at token", "margin, logits"], rows, digits=4)


def fidelity_table(results: BenchResults) -> TextTable:
    """What lossy methods changed."""
    found = [(c.name, c.fidelity) for c in results.competitors if c.fidelity is not None]
    rows: list[list[Cell]] = [[name, p.kl, p.total_variation, p.changed] for name, p in found]
    return TextTable(["competitor", "KL, nats", "total variation", "changed"], rows, digits=4)


def error_table(results: BenchResults) -> TextTable:
    """Questions without an answer, and why."""
    rows: list[list[Cell]] = [[c.name, q, why] for c in results.competitors for q, why in c.errors.items()]
    return TextTable(["competitor", "question", "why"], rows)
