"""Gains and divergences as a table, as CSV, and as a picture of one against the other."""

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from foretell.bench.charts import canvas, png
from foretell.bench.text_table import Cell, TextTable
from foretell.lab.frontier.run import VariantResult

DEFINITIONS: Mapping[str, str] = {
    "gain": "tokens/s over that of plain decoding of the exact model, same questions, interleaved; medians of repeats.",
    "predicted": "the gain that the roofline model predicts from the calibration of the device. Three things are of "
    "this run: the memory bandwidth (that of plain decoding), and of a method its drafts and its accepted tokens; so "
    "the prediction has seen these, but no gain. A dtype, a cache or a checkpoint is predicted from its formats and "
    "its shape, exits from the mean share of layers of their calibration; reading scattered rows (CATS, TEAL, Deja "
    "Vu) was fitted to passes of SmolLM2-135M. The error is predicted over measured, less "
    "one.",
    "bytes": "bytes of weights and cache per token of the exact model over those of the way. Not stated for exits.",
    "KL": "KL(way || exact) of the next token in nats, mean per token: of another model or cache on its own greedy "
    "answers, of a lossy method on answers sampled at temperature 1.",
    "TV": "total variation distance, in the same way.",
    "tokens": "share of tokens of the way's greedy answers that the exact model would not have chosen after "
    "the same text.",
    "answers": "share of greedy answers that differ from the exact model's in any token.",
    "perplexity": "of the way's greedy answers under the exact model.",
}
_LABEL_HEIGHT, _LABEL_STEPS = 4, 30
"""Points between the places of a name, and how many places above and below are tried."""
_HEADER = (
    "way", "gain", "predicted", "error", "bytes", "KL", "TV", "tokens", "answers", "perplexity",
)  # fmt: skip


def frontier_table(results: Sequence[VariantResult]) -> TextTable:
    """One row per variant, lossless ones first, then by KL divergence."""
    rows: list[list[Cell]] = []
    for r in ordered(results):
        p, error = r.price, r.prediction_error
        rows.append([
            p.way + ("" if p.lossless else " (lossy)"), r.gain, p.predicted_gain,
            None if error is None else f"{error:+.0%}", p.bytes_gain, f"{p.kl:.4f}", f"{p.total_variation:.4f}",
            f"{p.changed_tokens:.1%}", None if r.changed_answers is None else f"{r.changed_answers:.0%}",
            p.answer_perplexity,
        ])  # fmt: skip
    return TextTable(_HEADER, rows)


def ordered(results: Sequence[VariantResult]) -> list[VariantResult]:
    """Lossless variants first, then by KL divergence."""
    return sorted(results, key=lambda r: (not r.price.lossless, r.price.kl, -(r.gain or 0.0)))


def as_csv(results: Sequence[VariantResult]) -> str:
    """All numbers, one line per variant."""
    rows = [
        r.price.model_dump()
        | {"gain": r.gain, "changed_answers": r.changed_answers, "prediction_error": r.prediction_error}
        for r in ordered(results)
    ]
    buffer = StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else ["way"])
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def picture(results: Sequence[VariantResult]) -> bytes:
    """Measured gain against KL divergence as PNG; a cross is the prediction. Lossless variants lie on the axis.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure, axes = canvas()
    colours = {family: f"C{i}" for i, family in enumerate(dict.fromkeys(r.price.family for r in results))}
    for r in results:
        if r.gain is None:
            continue
        divergence, colour = r.price, colours[r.price.family]
        axes.scatter([divergence.kl], [r.gain], s=36, color=colour)
        if divergence.predicted_gain is not None:
            axes.plot([divergence.kl] * 2, [r.gain, divergence.predicted_gain], color=colour, linewidth=0.7)
            axes.scatter([divergence.kl], [divergence.predicted_gain], s=24, marker="x", color=colour)
    for family, colour in colours.items():
        axes.scatter([], [], color=colour, label=family)
    axes.axhline(1, color="#333333", linewidth=1)
    axes.set_xscale("symlog", linthresh=1e-4)
    axes.set_xlim(-3e-5, 8 * max(1e-3, *(r.price.kl for r in results)))
    axes.set_xlabel("price: KL divergence per token, nats (0: lossless)")
    axes.set_ylabel("gain over plain decoding")
    axes.legend(frameon=False, fontsize=7, loc="upper right")
    label_points(axes, [(r.price.way, r.price.kl, r.gain) for r in results if r.gain is not None])
    return png(figure)


def label_points(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Write the name of every point (name, x, y) beside it, the nearest place where it covers no other name; a line
    leads to a name that is not next to its point.
    """
    from matplotlib.text import Text

    axes.figure.draw_without_rendering()
    inside, boxes = axes.get_window_extent(), [axes.get_legend().get_window_extent()]
    line = {"arrowstyle": "-", "linewidth": 0.4, "color": "#999999", "shrinkA": 0, "shrinkB": 2}
    # Near places first, on either side, above and below.
    steps = sorted(range(-_LABEL_STEPS, _LABEL_STEPS + 1), key=abs)
    places = [(side, step) for step in steps for side in ("left", "right")]
    for name, x, y in sorted(points, key=lambda point: -point[2]):
        for side, step in places:
            label = axes.annotate(
                name, (x, y), textcoords="offset points", xytext=(6 if side == "left" else -6, _LABEL_HEIGHT * step),
                ha=side, va="center", fontsize=7, arrowprops=line if step else None,
            )  # fmt: skip
            # That of the annotation, which places the text, holds the line too.
            label.get_window_extent()
            box = Text.get_window_extent(label)
            within = inside.containsx(box.x0) and inside.containsx(box.x1) and inside.containsy(box.y0)
            if within and inside.containsy(box.y1) and not any(box.overlaps(other) for other in boxes):
                boxes.append(box)
                break
            label.remove()
