"""Charts of an assessment as PNG files by caption (extra `plot`)."""

from typing import Any

from foretell.bench.charts import canvas, png
from foretell.lab.assess.report import Assessment, label


def draw_charts(assessment: Assessment) -> dict[str, bytes]:
    """Reliability diagram, right answers by kind of prompt, and where there is another model KL by text.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawn = {"Reliability of the next token": _reliability, "Right answers by prompt": _conditions}
    if assessment.texts.compared:
        drawn["KL divergence by text"] = _divergence
    out = {}
    for caption, draw in drawn.items():
        figure, axes = canvas()
        draw(assessment, axes)
        out[caption] = png(figure)
    return out


def _reliability(assessment: Assessment, axes: Any) -> None:
    curves = [(label(assessment.model), assessment.texts.overall)]
    if assessment.against is not None and assessment.texts.other is not None:
        curves.append((label(assessment.against), assessment.texts.other))
    axes.plot([0, 1], [0, 1], linestyle=":", color="#888888", label="perfect")
    for name, c in curves:
        axes.plot(
            [b.confidence for b in c.bins], [b.accuracy for b in c.bins], marker="o", label=f"{name}, ECE {c.ece:.3f}"
        )
    axes.set_xlabel("confidence")
    axes.set_ylabel("share right")
    axes.legend(frameon=False, fontsize=8)


def _conditions(assessment: Assessment, axes: Any) -> None:
    subjects = [assessment.model] + ([assessment.against] if assessment.against is not None else [])
    names = list(assessment.model.answers_by_condition)
    height = 0.8 / len(subjects)
    for i, subject in enumerate(subjects):
        places = [k + (i - (len(subjects) - 1) / 2) * height for k in range(len(names))]
        axes.barh(places, [subject.answers_by_condition[n].accuracy for n in names], height, label=label(subject))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("share right")
    axes.legend(frameon=False, fontsize=8)


def _divergence(assessment: Assessment, axes: Any) -> None:
    names = list(assessment.texts.compared)
    axes.bar(names, [assessment.texts.compared[n].kl for n in names])
    axes.set_ylabel("KL, nats")
