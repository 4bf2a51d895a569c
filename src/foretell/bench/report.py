"""Results as sections: the Markdown and the HTML report are made of the same ones."""

from collections.abc import Callable

from foretell.bench.schema import Figures, Results
from foretell.bench.text_table import Cell, Section, Sheet

_DEPTHS = 8
"""Depths of the acceptance table."""


def markdown(results: Results) -> str:
    """The whole report as Markdown."""
    parts = [
        f"# {title(results)}\n\n{setting(results)}\n",
        *(s.markdown() for s in sections(results)),
        "## What the figures mean\n",
    ]
    return "\n".join([*parts, "".join(f"- **{name}**: {text}\n" for name, text in results.definitions.items())])


def title(results: Results) -> str:
    """What was measured."""
    return f"Decoding methods on {results.settings.model}"


def setting(results: Results) -> str:
    """Under which conditions."""
    s, repeats = results.settings, results.repeats
    return (
        f"{s.tasks}, at most {s.max_new_tokens} new tokens, temperature {s.temperature:g}, {repeats} "
        f"repeat{'s' * (repeats > 1)}, "
        f"{s.threads} thread{'s' * (s.threads > 1)}, {machine(results)}, {results.created}."
    )


def machine(results: Results) -> str:
    """The device that ran the models."""
    return results.machine.get("gpu") or results.machine.get("processor", "unknown processor")


def sections(results: Results) -> list[Section]:
    """Every table, those without content left out."""
    peers = [c.name for c in results.contenders if c.peer]
    found = [
        Section("All categories", summary(results)),
        Section("Speed-up over our own plain decoding, by category", by_category(results, lambda f: f.speedup, True)),
        *(Section(f"Speed over {p}, by category", by_category(results, _over(p), False)) for p in peers),
        Section("Tokens per pass, by category", by_category(results, lambda f: f.tokens_per_pass, False)),
        Section("Acceptance by depth, conditional / cumulative", acceptance(results)),
        Section("Where the time goes", times(results)),
        Section("Spec-Bench's own figures", spec_bench(results)),
        Section("Answers that differ from plain decoding", divergences(results)),
        Section("Price of the lossy methods", prices(results)),
        Section("Questions without an answer", refusals(results)),
    ]
    return [s for s in found if isinstance(s.body, str) or s.body.rows]


def _over(peer: str) -> Callable[[Figures], float | None]:
    return lambda f: f.over_peers.get(peer)


def summary(results: Results) -> Sheet:
    """One line per contender: means over the categories, and identity."""
    peers = [c.name for c in results.contenders if c.peer]
    rows: list[list[Cell]] = [
        [
            c.name + ("" if c.lossless else " (lossy)"),
            c.mean.tokens_per_pass,
            c.mean.tokens_per_second,
            c.mean.speedup,
            *(c.mean.over_peers.get(p) for p in peers),
            f"{c.identical}/{c.compared}" if c.compared else None,
            None if c.peak_memory_bytes is None else round(c.peak_memory_bytes / 1e6),
        ]
        for c in results.contenders
    ]
    over = [f"over {p}" for p in peers]
    return Sheet(["contender", "tokens per pass", "tokens/s", "speed-up", *over, "identical", "peak memory, MB"], rows)


def by_category(results: Results, figure: Callable[[Figures], float | None], peers: bool) -> Sheet:
    """A figure of every contender (`peers`: theirs too) and category."""
    shown = [c for c in results.contenders if peers or not c.peer]
    names = list(dict.fromkeys(n for c in shown for n in c.categories))
    rows: list[list[Cell]] = [
        [c.name, *(figure(c.categories[n]) if n in c.categories else None for n in names)] for c in shown
    ]
    return Sheet(["contender", *names], rows)


def acceptance(results: Results) -> Sheet:
    """Per depth, for methods that draft."""
    drafting = [c for c in results.contenders if c.pooled.acceptance_conditional]
    depth = min(_DEPTHS, max((len(c.pooled.acceptance_conditional) for c in drafting), default=0))

    def cells(f: Figures) -> list[str]:
        reached = [*f.acceptance_cumulative, *[0.0] * len(f.acceptance_conditional)]
        shown = [f"{a:.2f} / {b:.2f}" for a, b in zip(f.acceptance_conditional, reached, strict=False)][:depth]
        return shown + [""] * (depth - len(shown))

    rows: list[list[Cell]] = [
        [c.name, c.pooled.accepted_per_pass, c.pooled.drafted_per_pass, *cells(c.pooled)] for c in drafting
    ]
    return Sheet(["contender", "without bonus", "drafted per pass", *(str(d) for d in range(1, depth + 1))], rows)


def times(results: Results) -> Sheet:
    """Draft, verify, other; prefill; inter-token times."""
    header = [
        "contender",
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

    def row(name: str, f: Figures) -> list[Cell]:
        shares = [share(f.draft_share), share(f.verify_share), share(f.other_share)]
        waits = [f.prefill_seconds, f.inter_token_p50_ms, f.inter_token_p95_ms, f.gap_p95_ms]
        return [name, *shares, *waits, f.end_to_end_tokens_per_second]

    return Sheet(header, [row(c.name, c.pooled) for c in results.contenders if c.pooled.tokens_per_second])


def spec_bench(results: Results) -> Sheet:
    """#MAT and speed-ups its way."""
    groups = list(dict.fromkeys(g for c in results.contenders for g in c.spec_bench.speedup))
    rows: list[list[Cell]] = [
        [c.name, *(c.spec_bench.speedup.get(g) for g in groups), c.spec_bench.mat, c.spec_bench.overall]
        for c in results.contenders
    ]
    return Sheet(["contender", *groups, "#MAT", "overall"], rows if groups else [])


def divergences(results: Results) -> Sheet:
    """Answers of ours that left plain decoding's."""
    found = [(c.name, d) for c in results.contenders if not c.peer for d in c.divergences]
    rows: list[list[Cell]] = [[name, d.question, d.turn + 1, d.position, d.margin] for name, d in found]
    return Sheet(["contender", "question", "turn", "at token", "margin, logits"], rows, digits=4)


def prices(results: Results) -> Sheet:
    """What lossy methods changed."""
    found = [(c.name, c.price) for c in results.contenders if c.price is not None]
    rows: list[list[Cell]] = [[name, p.kl, p.total_variation, p.changed] for name, p in found]
    return Sheet(["contender", "KL, nats", "total variation", "changed"], rows, digits=4)


def refusals(results: Results) -> Sheet:
    """Questions without an answer, and why."""
    rows: list[list[Cell]] = [[c.name, q, why] for c in results.contenders for q, why in c.refused.items()]
    return Sheet(["contender", "question", "why"], rows)
