"""Charts of results as PNG files (extra `plot`)."""

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from foretell.bench.schema import BenchResults, CompetitorResult

_INK, _GRID = "#333333", "#dddddd"
_COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#cb912f", "#787774", "#d44c47")


def draw_charts(results: BenchResults) -> dict[str, bytes]:
    """PNG files by name, without empty charts.

    Raises:
        ValueError: matplotlib is not installed.
    """
    draw_functions: Mapping[str, Callable[[BenchResults, Any], bool]] = {
        "speedup": draw_speedup,
        "budget": draw_budget,
        "time": draw_times,
        "pareto": draw_pareto,
    }
    out = {}
    for name, draw in draw_functions.items():
        figure, axes = canvas()
        if draw(results, axes):
            out[name] = png(figure)
    return out


def png(figure: Any) -> bytes:
    """A figure as a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


def canvas() -> tuple[Any, Any]:
    """An empty figure and its axes, in the style of the reports.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("charts need matplotlib; run: pip install 'foretell[plot]'") from error
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_prop_cycle(color=_COLOURS)
    return figure, axes


def _drafting_methods(results: BenchResults) -> list[CompetitorResult]:
    """Competitors that draft, without peers."""
    return [c for c in results.competitors if not c.peer and c.pooled.acceptance_conditional]


def draw_speedup(results: BenchResults, axes: Any) -> bool:
    """Speed-up over our plain decoding per category."""
    shown = [c for c in _drafting_methods(results) if c.category_means.speedup]
    names = list(dict.fromkeys(n for c in shown for n in c.categories))
    width = 0.8 / max(len(shown), 1)
    for i, c in enumerate(shown):
        places = [k + (i - (len(shown) - 1) / 2) * width for k in range(len(names))]
        heights = [(c.categories[n].speedup or 0.0) if n in c.categories else 0.0 for n in names]
        axes.bar(places, heights, width, label=c.name)
    axes.axhline(1, color=_INK, linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_ylabel("speed-up over plain decoding")
    if shown:
        axes.legend(frameon=False, fontsize=8)
    return bool(shown)


def draw_budget(results: BenchResults, axes: Any) -> bool:
    """Tokens per pass against the drafted tokens allowed, for methods measured with several budgets."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for c in _drafting_methods(results):
        name, _, rest = c.name.partition("@")
        if rest and c.category_means.tokens_per_pass:
            size, _, precision = rest.partition("/")
            lines.setdefault(f"{name}/{precision}", []).append((int(size), c.category_means.tokens_per_pass))
    lines = {n: sorted(points) for n, points in lines.items() if len(points) > 1}
    for name, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xlabel("drafted tokens allowed per pass")
    axes.set_ylabel("tokens per pass")
    if lines:
        axes.legend(frameon=False, fontsize=8)
    return bool(lines)


def draw_times(results: BenchResults, axes: Any) -> bool:
    """Milliseconds per token in the drafter, the target's pass, and everything else."""
    shown = [c for c in results.competitors if c.pooled.verify_share is not None and c.pooled.tokens_per_second]
    left = [0.0] * len(shown)
    for part in ("verify", "draft", "other"):
        shares = {"verify": [c.pooled.verify_share for c in shown], "draft": [c.pooled.draft_share for c in shown]}
        values = shares.get(part, [c.pooled.other_share for c in shown])
        widths = [(v or 0.0) * 1e3 / c.pooled.tokens_per_second for v, c in zip(values, shown, strict=True)]
        axes.barh([c.name for c in shown], widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_xlabel("ms per token")
    if shown:
        axes.legend(frameon=False, fontsize=8)
    return bool(shown)


def draw_pareto(results: BenchResults, axes: Any) -> bool:
    """Relative cost of drafting against tokens per pass: up and to the left is better."""
    shown = [c for c in _drafting_methods(results) if c.pooled.draft_share is not None and c.pooled.verify_share]
    for c in shown:
        cost = (c.pooled.draft_share or 0.0) / (c.pooled.verify_share or 1.0)
        gain = c.pooled.tokens_per_pass or 0.0
        axes.scatter([cost], [gain], s=40)
        axes.annotate(c.name, (cost, gain), textcoords="offset points", xytext=(6, 4), fontsize=8, color=_INK)
    axes.margins(x=0.25, y=0.2)
    axes.set_xlabel("drafting time over time of the target's pass")
    axes.set_ylabel("tokens per pass")
    return bool(shown)
