"""Runs an assessment, and writes it into a folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretell.api import Model
from foretell.bench.html_report import render_page
from foretell.bench.machine import describe_machine
from foretell.bench.output import write_files
from foretell.bench.report import markdown_page
from foretell.lab.assess.answers import assess_answers
from foretell.lab.assess.charts import draw_charts
from foretell.lab.assess.fidelity import assess_texts
from foretell.lab.assess.probes import Probe, accuracy_by_relation, ask
from foretell.lab.assess.recall import recall
from foretell.lab.assess.report import DEFINITIONS, Assessment, Subject, sections, title
from foretell.lab.assess.texts import domain_texts


@dataclass(frozen=True)
class AssessSettings:
    """How much is measured. `decoded`: texts are read token by token from their middle on, as they are decoded."""

    length: int = 512
    tokens: int = 2048
    answers: int = 12
    max_new_tokens: int = 64
    recall_texts: int = 12
    recall_facts: int = 8
    seed: int = 0
    decoded: bool = False


def assess(
    model: Model,
    against: Model | None,
    texts: Sequence[Path],
    probes: tuple[Probe, ...],
    settings: AssessSettings,
    progress: Callable[[str], None] = lambda text: None,
) -> Assessment:
    """Measure a model, and the other one in the same way.

    Raises:
        ValueError: a text is too short or does not fit into a context, or the vocabularies differ.
    """
    progress("reading texts")
    domains = domain_texts(model, texts, settings.length, settings.tokens)
    read = assess_texts(model, against, domains, settings.decoded)
    subjects = [_subject(m, probes, settings, progress) for m in (model, against) if m is not None]
    progress("writing answers")
    answers = assess_answers(model, against, settings.answers, settings.max_new_tokens)
    return Assessment(subjects[0], subjects[1] if against is not None else None, read, answers, probes)


def _subject(
    model: Model, probes: Sequence[Probe], settings: AssessSettings, progress: Callable[[str], None]
) -> Subject:
    progress(f"asking {model.name} {model.precision}")
    asked = ask(model, probes, settings.seed)
    progress(f"asking {model.name} {model.precision} what a text says")
    found = recall(model, settings.recall_texts, settings.recall_facts, settings.seed)
    return Subject(model.name, model.precision, str(model.runner().backend), asked, found)


def as_record(found: Assessment) -> dict[str, Any]:
    """The assessment as JSON values."""

    def subject(s: Subject) -> dict[str, Any]:
        conditions = {
            name: {"accuracy": a.accuracy, "confidence": a.confidence, "ece": a.ece, "flips": s.noise_flips(name)}
            for name, a in s.answers_by_condition.items()
        }
        return {
            "name": s.name, "dtype": s.dtype, "backend": s.backend,
            "probes": {"margin": s.clean.margin, "consistency": s.consistency, "copied": s.copied}
            | {"conditions": conditions, "relations": accuracy_by_relation(found.probes, s.clean)},
            "recall": s.recall,
        }  # fmt: skip

    return {
        "model": subject(found.model),
        "against": None if found.against is None else subject(found.against),
        "measures": found.measures(),
        "intervals": found.intervals(),
        "texts": asdict(found.texts),
        "answers": asdict(found.answers),
        "machine": describe_machine(),
    }


def write_assessment(folder: Path, found: Assessment, conditions: str) -> list[Path]:
    """Write `assess.json`, `report.md`, `report.html` and, where matplotlib is installed, charts."""
    charts: Mapping[str, bytes] = draw_charts(found) if find_spec("matplotlib") is not None else {}
    tables = sections(found)
    page = render_page(title(found), conditions, charts, tables, DEFINITIONS, describe_machine())
    pictures = {f"{caption.lower().replace(' ', '-')}.png": content for caption, content in charts.items()}
    return write_files(
        folder,
        {
            "assess.json": (json.dumps(as_record(found), indent=1) + "\n").encode(),
            "report.md": markdown_page(title(found), conditions, tables, DEFINITIONS).encode(),
            "report.html": page.encode(),
            **pictures,
        },
    )
