"""The training curve: metrics of every step, as CSV and as a plot."""

import csv
from collections.abc import Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from pydantic import Field

from foretell.utils.paths import replace_file
from foretell.utils.validation import FrozenModel

_AXES_COLOR, _GRID_COLOR, _LOSS_COLOR, _TOKENS_COLOR = "#333333", "#dddddd", "#0b6e99", "#d9730d"


class StepMetrics(FrozenModel):
    """Metrics of one optimizer step."""

    step: int
    """Counted from 1."""
    tokens: int
    """Tokens trained on so far, without padding."""
    loss: float
    lr: float
    seconds: float
    """Training time so far, measurements included."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Further metrics of the recipe."""
    tokens_per_pass: float | None = None
    """Measured after this step; None: not measured."""


def write_curve(out: Path, rows: Sequence[StepMetrics], with_plot: bool) -> None:
    """Write `curve.csv` and, if matplotlib is installed, `curve.png`."""
    replace_file(out / "curve.csv", to_csv(rows))
    if with_plot:
        png = plot(rows)
        if png is not None:
            replace_file(out / "curve.png", png)


def to_csv(rows: Sequence[StepMetrics]) -> str:
    """Steps as CSV; a metric that a step lacks is left empty."""
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
    """A PNG of loss and tokens per pass over the tokens trained on; None: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot([r.tokens for r in rows], [r.loss for r in rows], color=_LOSS_COLOR, alpha=0.25, linewidth=0.8)
    above.plot([r.tokens for r in rows], smooth([r.loss for r in rows]), color=_LOSS_COLOR)
    above.set_ylabel("loss")
    measured = [(r.tokens, r.tokens_per_pass) for r in rows if r.tokens_per_pass is not None]
    below.plot([t for t, _ in measured], [m for _, m in measured], color=_TOKENS_COLOR, marker="o", markersize=4)
    below.set_ylabel("tokens per pass, held-out prompts")
    below.set_xlabel("tokens trained on")
    for axes in (above, below):
        _style_axes(axes)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def smooth(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """A bias-corrected exponential moving average."""
    out, mean, weight = list[float](), 0.0, 0.0
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def _style_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_AXES_COLOR)
    axes.grid(axis="y", color=_GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
