"""Results as Markdown."""

from collections.abc import Callable, Iterable, Sequence

from foretell.bench.schema import Contender, Figures, Results

Cell = str | float | int | None


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]], digits: int = 2) -> str:
    """A Markdown table; numbers are rounded, None is a dash."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(_cell(c, digits) for c in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Cell, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def markdown(results: Results) -> str:
    """The whole report."""
    s = results.settings
    parts = [
        f"# Decoding methods on {s.model}\n",
        f"{s.tasks}, at most {s.max_new_tokens} new tokens, temperature {s.temperature:g}, {results.repeats} "
        f"repeat{'s' * (results.repeats > 1)}, {s.threads} threads, {results.machine.get('processor', '')}, {results.created}.\n",
        "## All categories\n",
        summary(results),
        "## Speed-up over our own plain decoding, by category\n",
        by_category(results, lambda f: f.speedup, own_only=False),
    ]
    for peer in (c.name for c in results.contenders if c.peer):
        parts += [f"## Speed over {peer}, by category\n", by_category(results, _over(peer), own_only=True)]
    parts += [
        "## Tokens per pass, by category\n",
        by_category(results, lambda f: f.tokens_per_pass, own_only=True),
        "## Acceptance by depth, conditional / cumulative\n",
        acceptance(results),
        "## Where the time goes\n",
        times(results),
        "## Spec-Bench's own figures\n",
        spec_bench(results),
        divergences(results),
        refusals(results),
        "## What the figures mean\n",
        "".join(f"- **{name}**: {text}\n" for name, text in results.definitions.items()),
    ]
    return "\n".join(p for p in parts if p)


def _over(peer: str) -> Callable[[Figures], float | None]:
    return lambda f: f.over_peers.get(peer)


def summary(results: Results) -> str:
    """One line per contender: means over the categories, and identity."""
    peers = [c.name for c in results.contenders if c.peer]
    header = [
        "contender",
        "tokens per pass",
        "tokens/s",
        "speed-up",
        *(f"over {p}" for p in peers),
        "identical",
        "peak memory, MB",
    ]
    return table(
        header,
        (
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
        ),
    )


def by_category(results: Results, figure: Callable[[Figures], float | None], own_only: bool) -> str:
    """A figure of every contender and category."""
    shown = [c for c in results.contenders if not (own_only and c.peer)]
    names = list(dict.fromkeys(n for c in shown for n in c.categories))
    return table(
        ["contender", *names],
        ([c.name, *(figure(c.categories[n]) if n in c.categories else None for n in names)] for c in shown),
    )


def acceptance(results: Results) -> str:
    """Per depth, for methods that draft."""
    drafting = [c for c in results.contenders if c.pooled.acceptance_conditional]
    depth = min(8, max((len(c.pooled.acceptance_conditional) for c in drafting), default=0))
    if not depth:
        return "No contender drafts.\n"

    def cells(f: Figures) -> list[str]:
        pairs = zip(
            f.acceptance_conditional, [*f.acceptance_cumulative, *[0.0] * len(f.acceptance_conditional)], strict=False
        )
        shown = [f"{a:.2f} / {b:.2f}" for a, b in pairs][:depth]
        return shown + [""] * (depth - len(shown))

    header = ["contender", "without bonus", "drafted per pass", *(str(d) for d in range(1, depth + 1))]
    return table(
        header, ([c.name, c.pooled.accepted_per_pass, c.pooled.drafted_per_pass, *cells(c.pooled)] for c in drafting)
    )


def times(results: Results) -> str:
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

    return table(
        header,
        (
            [
                c.name,
                share(c.pooled.draft_share),
                share(c.pooled.verify_share),
                share(c.pooled.other_share),
                c.pooled.prefill_seconds,
                c.pooled.inter_token_p50_ms,
                c.pooled.inter_token_p95_ms,
                c.pooled.gap_p95_ms,
                c.pooled.end_to_end_tokens_per_second,
            ]
            for c in results.contenders
        ),
    )


def spec_bench(results: Results) -> str:
    """#MAT and speed-ups its way."""
    groups = list(dict.fromkeys(g for c in results.contenders for g in c.spec_bench.speedup))
    rows = (
        [c.name, *(c.spec_bench.speedup.get(g) for g in groups), c.spec_bench.mat, c.spec_bench.overall]
        for c in results.contenders
    )
    return table(["contender", *groups, "#MAT", "overall"], rows)


def divergences(results: Results) -> str:
    """Answers that left plain decoding's; empty if none did."""
    found = [(c, d) for c in results.contenders if not c.peer for d in c.divergences]
    if not found:
        return ""
    rows: Iterable[list[Cell]] = ([c.name, d.question, d.turn + 1, d.position, d.margin] for c, d in found)
    lines = table(["contender", "question", "turn", "at token", "margin, logits"], rows, digits=4)
    return "## Answers that differ from plain decoding\n\n" + lines + _prices(results.contenders)


def _prices(contenders: Sequence[Contender]) -> str:
    rows: list[list[Cell]] = [
        [c.name, c.price.kl, c.price.total_variation, c.price.changed] for c in contenders if c.price is not None
    ]
    return (
        "\nPrice of the lossy methods:\n\n" + table(["contender", "KL, nats", "total variation", "changed"], rows, 4)
        if rows
        else ""
    )


def refusals(results: Results) -> str:
    """Questions without an answer, and why; empty if there are none."""
    lines = [f"- {c.name}, {q}: {why}\n" for c in results.contenders for q, why in c.refused.items()]
    return "## Questions without an answer\n\n" + "".join(lines) if lines else ""
