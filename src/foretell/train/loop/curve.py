"""The course of a training: a row per step, as CSV and as a picture."""

import csv
import os
from collections.abc import Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

_INK, _GRID, _LOSS, _GAIN = "#333333", "#dddddd", "#0b6e99", "#d9730d"


class StepMetrics(BaseModel):
    """One step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Counted from 1."""
    tokens: int
    """Seen so far, padding apart."""
    loss: float
    lr: float
    seconds: float
    """Of training so far, measuring included."""
    metrics: dict[str, float] = {}
    tokens_per_pass: float | None = None
    """Measured after this step."""


def write_curve(out: Path, rows: Sequence[StepMetrics], picture: bool) -> None:
    """Write `curve.csv` and, where matplotlib is there, `curve.png`."""
    _replace(out / "curve.csv", to_csv(rows).encode())
    if picture:
        drawn = plot(rows)
        if drawn is not None:
            _replace(out / "curve.png", drawn)


def to_csv(rows: Sequence[StepMetrics]) -> str:
    """Rows as CSV; a figure that a step lacks is left empty."""
    names = list(dict.fromkeys(n for r in rows for n in r.metrics))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "tokens", "loss", "lr", "seconds", "tokens_per_pass", *names])
    for r in rows:
        measured = "" if r.tokens_per_pass is None else f"{r.tokens_per_pass:.4f}"
        figures = [f"{r.metrics[n]:.6g}" if n in r.metrics else "" for n in names]
        writer.writerow([r.step, r.tokens, f"{r.loss:.6g}", f"{r.lr:.4g}", f"{r.seconds:.1f}", measured, *figures])
    return text.getvalue()


def plot(rows: Sequence[StepMetrics]) -> bytes | None:
    """The loss, and below it tokens per pass, against the tokens trained on; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot([r.tokens for r in rows], [r.loss for r in rows], color=_LOSS, alpha=0.25, linewidth=0.8)
    above.plot([r.tokens for r in rows], smooth([r.loss for r in rows]), color=_LOSS)
    above.set_ylabel("loss")
    measured = [(r.tokens, r.tokens_per_pass) for r in rows if r.tokens_per_pass is not None]
    below.plot([t for t, _ in measured], [m for _, m in measured], color=_GAIN, marker="o", markersize=4)
    below.set_ylabel("tokens per pass, held-out prompts")
    below.set_xlabel("tokens trained on")
    for axes in (above, below):
        _style_axes(axes)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def smooth(values: Sequence[float], share: float = 0.95) -> list[float]:
    """A moving average without a bias towards its beginning."""
    out, mean, weight = list[float](), 0.0, 0.0
    for value in values:
        mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        out.append(mean / weight)
    return out


def _style_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)
