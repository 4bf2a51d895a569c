"""The drawings of the survey's figures: their labels can be read, and the turning points are marked."""

import itertools
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Annotation, Text

from foretell.roofline.hardware import known_hardware, memory_tier
from foretell.roofline.paper.figures import FIGURES, figure
from foretell.roofline.paper.plots import DRAW, ridge_points


def drawn(number: int) -> Canvas:
    """The canvas of a figure, laid out."""
    canvas = Canvas(figsize=(8.6, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(canvas)
    DRAW[number](canvas, figure(number).records)
    canvas.draw_without_rendering()
    return canvas


def labels(canvas: Canvas) -> list[Text]:
    """Labels inside the axes, and those of the legends and ticks."""
    found = list[Text]()
    for ax in canvas.axes:
        found += [t for t in ax.texts if t.get_text()]
        legend = ax.get_legend()
        found += legend.get_texts() if legend else []
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [
                t.label1
                for t in axis.get_major_ticks()
                if t.label1.get_text() and low * 0.999 <= t.get_loc() <= high * 1.001
            ]
    return found


@pytest.mark.parametrize("number", FIGURES)
def test_no_label_covers_another_or_leaves_the_picture(number: int) -> None:
    canvas = drawn(number)
    renderer: Any = canvas.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in labels(canvas)]
    whole = canvas.bbox
    for name, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1, name
    # A pixel of common edge is no overlap.
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1, f"{one!r} covers {two!r}"


@pytest.mark.parametrize("number", [5, 6, 18])
def test_labels_in_the_axes_stay_in_them(number: int) -> None:
    canvas = drawn(number)
    renderer: Any = canvas.canvas.get_renderer()  # type: ignore[attr-defined]
    (ax,) = canvas.axes
    for each in ax.texts:
        assert each.get_window_extent(renderer).x1 <= ax.get_window_extent(renderer).x1 + 1, each.get_text()


@pytest.mark.parametrize(("number", "count"), [(5, 1), (6, 3), (18, 3), (20, 2)])
def test_turning_points_are_marked(number: int, count: int) -> None:
    marked = [t.get_text() for ax in drawn(number).axes for t in ax.texts if isinstance(t, Annotation)]
    assert sum(text.endswith("OPs/byte") for text in marked) == count


def test_a_turning_point_is_peak_over_bandwidth() -> None:
    gpu, ddr = known_hardware()["a6000"], memory_tier("ddr")
    peaks = {gpu.peaks[k] for k in ("fp16", "int8", "int4")}
    assert {round(x * gpu.bandwidth) for x, _ in ridge_points(figure(6).records)} == {round(p) for p in peaks}
    assert ridge_points(figure(18).records)[1][0] == pytest.approx(gpu.peaks["fp16"] / ddr.bandwidth)
