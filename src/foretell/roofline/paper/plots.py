"""Figures as pictures; needs matplotlib (`pip install foretell[plot]`)."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.roofline.paper.figures import Figure, Records
from foretell.roofline.published import ComparedRow

COLOURS = ("#2f6f8f", "#d9822b", "#5b8c3a", "#8b5aa8", "#b5403a", "#6b6f76")
INK, MUTED = "#22303a", "#7b8791"
_TERA = 1e-12


def draw(figure: Figure, out: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending.

    Raises:
        ValueError: matplotlib is missing, or an ending it cannot write.
    """
    write_picture(out, figure.title, figure.note, lambda canvas: DRAW[figure.number](canvas, figure.records))


def write_picture(out: Path, title: str, note: str, paint: Callable[[Any], None]) -> None:
    """Write what `paint` draws on a canvas, under a title and above a note, as PNG, SVG or PDF.

    Raises:
        ValueError: matplotlib is missing, or an ending it cannot write.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ValueError("figures need matplotlib: pip install 'foretell[plot]'") from None
    canvas = Canvas(figsize=(8.6, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(canvas)
    paint(canvas)
    canvas.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    canvas.supxlabel(textwrap.fill(note, 130), x=0.01, ha="left", fontsize=8.5, color=MUTED)
    canvas.savefig(out)


def draw_published(compared: Sequence[ComparedRow], out: Path) -> None:
    """Write predicted speed-ups against published ones, and the errors of all rows by group.

    Raises:
        ValueError: matplotlib is missing, or an ending it cannot write.
    """
    note = "Filled: the prediction is checked on the row; hollow: a figure of its runtime was fitted to it."
    write_picture(out, "Published and predicted", note, lambda canvas: _published(canvas, compared))


def _published(canvas: Any, compared: Sequence[ComparedRow]) -> None:
    groups = list(dict.fromkeys(c.row.group for c in compared))
    left, right = _axes(canvas, 1, 2)[0]
    left.plot([0.7, 7], [0.7, 7], color=MUTED, linewidth=1)
    right.axvline(0, color=MUTED, linewidth=1)
    for at, (group, colour) in enumerate(zip(groups, COLOURS, strict=False)):
        rows = [c for c in compared if c.row.group == group]
        for i, c in enumerate(rows):
            face = "none" if c.row.fit else colour
            if c.row.measure == "speedup":
                left.plot(c.row.published, c.predicted, "o", markersize=4, color=colour, markerfacecolor=face)
            height = len(groups) - at + 0.6 * (i / len(rows) - 0.5)
            right.plot(100 * c.error, height, "o", markersize=4, color=colour, markerfacecolor=face)
    left.set_xscale("log")
    left.set_yscale("log")
    for axis in (left.xaxis, left.yaxis):
        axis.set_ticks([0.7, 1, 1.5, 2, 3, 4, 6], labels=["0.7", "1", "1.5", "2", "3", "4", "6"])
        axis.set_ticks([], minor=True)
    left.set_xlabel("published speed-up")
    left.set_ylabel("predicted")
    right.set_yticks(range(len(groups), 0, -1), [g.replace("_", " ") for g in groups])
    right.set_xlabel("error of the prediction, %")


def _axes(canvas: Any, rows: int, columns: int) -> Any:
    axes = canvas.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(colors=INK, labelsize=9)
        ax.grid(True, color="#e7ebee", linewidth=0.8)
        ax.set_axisbelow(True)
    return axes


def _names(records: Records, key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in records))


def _curves(
    ax: Any,
    records: Records,
    group: str,
    x: str,
    y: str,
    scale: float = 1.0,
    label: Callable[[Any], str] = str,
    thinning: float = 0.0,
) -> None:
    """Lines by group. thinning: points by which each line is thinner than the one before, where lines coincide."""
    names = _names(records, group)
    for at, name in enumerate(names):
        mine = [r for r in records if r[group] == name]
        ax.plot(
            [r[x] for r in mine],
            [r[y] * scale for r in mine],
            color=COLOURS[at % len(COLOURS)],
            linewidth=2 + thinning * (len(names) - 1 - at),
            label=label(name),
        )
    ax.legend(frameon=False, fontsize=9)


def _plain_ticks(axis: Any, *values: float) -> None:
    """Ticks of a logarithmic axis at these values, written in full."""
    axis.set_ticks(values, labels=[f"{v:g}" if v % 1000 else f"{v / 1000:g}k" for v in values])
    axis.set_ticks([], minor=True)


def ridge_points(records: Records) -> list[tuple[float, float]]:
    """Where each roof turns: (OPs per byte, OPs/s)."""
    ridges = []
    for name in _names(records, "line"):
        mine = [r for r in records if r["line"] == name]
        top = max(r["performance"] for r in mine)
        ridges.append((min(r["intensity"] for r in mine if r["performance"] == top), top))
    return ridges


def _roofs(ax: Any, records: Records, logarithmic: bool = False) -> None:
    """Rooflines with their turning points marked, widest first, so that coinciding slopes all show."""
    if logarithmic:
        ends = zip(_names(records, "line"), ridge_points(records), strict=True)
        most = max(r["intensity"] for r in records)
        records = [
            {"line": name, "intensity": at, "performance": y * min(1, at / x)}
            for name, (x, y) in ends
            for at in (1, x, most)
        ]
    _curves(ax, records, "line", "intensity", "performance", _TERA, thinning=1.5)
    for (x, y), colour in zip(ridge_points(records), COLOURS, strict=False):
        ax.plot(x, y * _TERA, "o", color=colour, markersize=8, markeredgecolor="white", zorder=4)
        ax.annotate(f"{x:.0f} OPs/byte", (x, y * _TERA), (7, -14), textcoords="offset points", fontsize=8.5, color=INK)
    ax.set_xlabel("OPs per byte")
    ax.set_ylabel("TOP/s")
    if logarithmic:
        ax.set_xscale("log")
        ax.set_yscale("log")
        _plain_ticks(ax.xaxis, 1, 10, 100, 1000)
        _plain_ticks(ax.yaxis, 0.1, 1, 10, 100)
    else:
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)


def _figure5(canvas: Any, records: Records) -> None:
    ax = _axes(canvas, 1, 1)[0, 0]
    roof = [r for r in records if r["line"] == "16-bit"]
    ((turn, peak),) = ridge_points(roof)
    top = peak * 1e-12
    # On logarithmic axes the decode operations, two hundred times left of the turning point, can be seen too.
    ax.loglog([0.1, turn, 5000], [0.1 * top / turn, top, top], color=INK, linewidth=2)
    ax.axvspan(0.1, turn, color="#b5403a", alpha=0.06)
    ax.axvspan(turn, 5000, color="#5b8c3a", alpha=0.08)
    ax.text(0.13, top * 1.25, "memory bound", color="#b5403a", fontsize=9)
    ax.text(turn * 1.1, top * 1.25, "compute bound", color="#3f6b26", fontsize=9)
    # Where a stage has the intensity of the other, its ring shows around the other's dot.
    for stage, colour, size, face, named in (
        ("prefill", COLOURS[1], 90, "none", {"gate_proj": (-4, -18), "qk_matmul": (9, -12), "softmax": (10, -4)}),
        ("decode", COLOURS[0], 24, COLOURS[0], {"q_proj": (8, -14), "attn_add": (8, -10)}),
    ):
        mine = [r for r in records if r["line"].startswith(stage)]
        spots = [(r["intensity"], r["performance"] * 1e-12) for r in mine]
        ax.scatter(*zip(*spots, strict=True), edgecolors=colour, facecolors=face, linewidths=1.8, label=stage, zorder=3,
                   s=size)  # fmt: skip
        for r, spot in zip(mine, spots, strict=True):
            name = r["line"].split()[1]
            if name in named:
                said = "softmax, both stages" if name == "softmax" else r["line"]
                ax.annotate(said, spot, named[name], textcoords="offset points", fontsize=8, color=INK)
    ax.plot(turn, top, "D", color=INK, markersize=6)
    ax.annotate(f"{turn:.0f} OPs/byte", (turn, top), (8, -12), textcoords="offset points", fontsize=8.5, color=INK)
    ax.set_xlabel("OPs per byte")
    ax.set_ylabel("TOP/s")
    ax.set_xlim(0.1, 5000)
    ax.set_ylim(0.08, top * 2)
    _plain_ticks(ax.xaxis, 0.1, 1, 10, 100, 1000)
    _plain_ticks(ax.yaxis, 0.1, 1, 10, 100)
    ax.legend(frameon=False, loc="lower right")


def _figure6(canvas: Any, records: Records) -> None:
    _roofs(_axes(canvas, 1, 1)[0, 0], records)


def _figure7(canvas: Any, records: Records) -> None:
    parts = ("weights", "cache", "activations")
    for ax, stage in zip(_axes(canvas, 1, 2)[0], ("decode", "prefill"), strict=True):
        mine = [r for r in records if r["stage"] == stage]
        groups = list(dict.fromkeys((r["batch"], r["length"]) for r in mine))
        formats = _names(mine, "format")
        for at, r in enumerate(mine):
            x = groups.index((r["batch"], r["length"])) * (len(formats) + 1) + formats.index(r["format"])
            base = 0.0
            for part, colour in zip(parts, COLOURS, strict=False):
                ax.bar(x, r[part], bottom=base, color=colour, width=0.85, label=part if at == 0 else None)
                base += r[part]
            ax.text(x, base + 0.01, r["format"], rotation=90, ha="center", va="bottom", fontsize=7.5, color=INK)
        ax.set_xticks(
            [g * (len(formats) + 1) + 1.5 for g in range(len(groups))], [f"batch {b}\n{s} tokens" for b, s in groups]
        )
        ax.set_ylim(0, 1.28)
        ax.grid(False, axis="x")
        ax.set_title(stage, fontsize=10, color=INK)
    canvas.axes[0].set_ylabel("relative to FP16")
    canvas.axes[1].legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


def _figure8(canvas: Any, records: Records) -> None:
    ax = _axes(canvas, 1, 1)[0, 0]
    _curves(ax, records, "weights", "batch", "seconds", 1e3, lambda w: f"W{w}")
    ax.set_xlabel("batch")
    ax.set_ylabel("ms per pass")
    ax.set_ylim(bottom=0)


def _figure9(canvas: Any, records: Records) -> None:
    ax = _axes(canvas, 1, 1)[0, 0]
    _curves(ax, records, "weights", "context", "seconds", 1e3, lambda w: f"W{w}", thinning=1.6)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    _plain_ticks(ax.xaxis, 16, 32, 64, 128, 256, 512, 1024)
    _plain_ticks(ax.yaxis, 2, 5, 10, 20, 50, 100, 200)
    ax.set_xlabel("prompt tokens")
    ax.set_ylabel("ms")


def _figure11(canvas: Any, records: Records) -> None:
    ax = _axes(canvas, 1, 1)[0, 0]
    _curves(ax, records, "format", "context", "memory", 1e-9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain_ticks(ax.xaxis, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
    _plain_ticks(ax.yaxis, 7, 10, 14, 20, 26, 50, 100, 200)
    ax.set_xlabel("tokens of context")
    ax.set_ylabel("GB")


def _figure16(canvas: Any, records: Records) -> None:
    bars = (("traffic", COLOURS[0], "traffic"), ("time", COLOURS[1], "time"),
            ("paper_traffic", "#c9d7de", "traffic, paper"), ("paper_time", "#f1d9bd", "time, paper"))  # fmt: skip
    for ax, stage in zip(_axes(canvas, 1, 2)[0], ("decode", "prefill"), strict=True):
        mine = [r for r in records if r["stage"] == stage]
        for offset, (key, colour, label) in enumerate(bars):
            spots = [x + 0.22 * (offset - 1.5) for x in range(len(mine))]
            ax.bar(spots, [r[key] for r in mine], 0.2, color=colour, label=label)
            for x, r in zip(spots, mine, strict=True):
                ax.text(x, r[key] + 1, f"{r[key]:.1f}", ha="center", va="bottom", rotation=90, fontsize=7, color=INK)
        names = [f"{r['length'] // 1000}k\nbatch {r['batch']}" for r in mine]
        ax.set_xticks(range(len(mine)), names, fontsize=8)
        ax.grid(False, axis="x")
        ax.set_title(stage, fontsize=10, color=INK)
        ax.set_ylim(0, 112)
    canvas.axes[0].set_ylabel("saved, %")
    canvas.axes[0].legend(frameon=False, fontsize=8, loc="upper left")


def _figure18(canvas: Any, records: Records) -> None:
    # The processor's roof is a hundredth of the GPU's: on linear axes it would lie on the axis.
    _roofs(_axes(canvas, 1, 1)[0, 0], records, logarithmic=True)


def _figure19(canvas: Any, records: Records) -> None:
    panels = (("tokens_per_second", 1.0, "tokens/s"), ("seconds", 1e3, "ms per pass"), ("memory", 1e-9, "GB"))
    for ax, (key, scale, label) in zip(_axes(canvas, 1, 3)[0], panels, strict=True):
        _curves(ax, records, "context", "batch", key, scale, lambda s: f"{s} tokens")
        ax.set_xlabel("batch")
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
    canvas.axes[2].axhline(48, color="#b5403a", linestyle="--", linewidth=1.2)


def _figure20(canvas: Any, records: Records) -> None:
    left, right = _axes(canvas, 1, 2)[0]
    _roofs(left, [r for r in records if r["intensity"] is not None])
    left.axvline(50, color=MUTED, linestyle="--", linewidth=1)
    mine = [r for r in records if r["seconds"] is not None]
    right.plot(
        [r["bandwidth"] * 1e-12 for r in mine], [r["seconds"] * 1e3 for r in mine], "o-", color=COLOURS[0], markersize=4
    )
    right.set_xlabel("bandwidth, TB/s")
    right.set_ylabel("ms per decode pass")
    right.set_ylim(bottom=0)


DRAW: Mapping[int, Callable[[Any, Records], None]] = {
    5: _figure5, 6: _figure6, 7: _figure7, 8: _figure8, 9: _figure9, 11: _figure11, 16: _figure16, 18: _figure18,
    19: _figure19,
    20: _figure20,
}  # fmt: skip
