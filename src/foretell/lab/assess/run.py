"""Runs an assessment, and writes it into a folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int

from foretell.api import Model
from foretell.bench.html_report import render_page
from foretell.bench.machine import describe_machine
from foretell.bench.output import write_files
from foretell.bench.report import markdown_page
from foretell.lab.assess.answers import assess_answers
from foretell.lab.assess.charts import draw_charts
from foretell.lab.assess.fidelity import assess_texts
from foretell.lab.assess.probes import Probe, accuracy_by_relation, ask, conditions
from foretell.lab.assess.recall import check_facts, questions, recall
from foretell.lab.assess.report import DEFINITIONS, Assessment, Subject, sections, title
from foretell.lab.assess.texts import domain_texts

_DECODED = 4
"""Tokens of a prompt that take the time of a token which is decoded alone, roughly: for the share of the work."""


@dataclass(frozen=True)
class AssessSettings:
    """How much is measured. `decoded`: texts are read token by token from their middle on, as they are decoded.

    Raises:
        ValueError: a number of facts of which no text for recall is made.
    """

    length: int = 512
    tokens: int = 2048
    answers: int = 12
    max_new_tokens: int = 64
    recall_texts: int = 12
    recall_facts: int = 8
    seed: int = 0
    decoded: bool = False

    def __post_init__(self) -> None:
        check_facts(self.recall_facts)

    def quick(self, tokens: bool = True, answers: bool = True) -> "AssessSettings":
        """The same with fewer texts of facts, and with fewer tokens of text and answers where these may be changed."""
        return replace(
            self,
            recall_texts=4,
            tokens=512 if tokens else self.tokens,
            answers=4 if answers else self.answers,
        )


class _Work:
    """Counts what is done, in tokens that are read, and tells its share of all. `total`: tokens in all."""

    def __init__(self, total: float, progress: Callable[[str, float], None]) -> None:
        self._total, self._progress = max(total, 1.0), progress
        self._done, self._what = 0.0, ""

    def begin(self, what: str) -> None:
        """Begin another part."""
        self._what = what
        self.add(0)

    def add(self, tokens: float) -> None:
        """Some tokens were read."""
        self._done += tokens
        self._progress(self._what, min(self._done / self._total, 1.0))


def assess(
    model: Model,
    against: Model | None,
    texts: Sequence[Path],
    probes: tuple[Probe, ...],
    settings: AssessSettings,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Assessment:
    """Measure a model, and the other one in the same way. `progress` is called with what is done now, and the share of
    the work that is done.

    Raises:
        ValueError: a text is too short or does not fit into a context, or the vocabularies differ.
    """
    models = [m for m in (model, against) if m is not None]
    domains = domain_texts(model, texts, settings.length, settings.tokens)
    work = _Work(_tokens(models, domains, probes, settings), progress)
    work.begin("reading texts")
    read = assess_texts(model, against, domains, settings.decoded, work.add)
    subjects = [_subject(m, probes, settings, work) for m in models]
    work.begin("writing answers")
    answers = assess_answers(
        model, against, settings.answers, settings.max_new_tokens, lambda tokens: work.add(_DECODED * tokens)
    )
    return Assessment(subjects[0], subjects[1] if against is not None else None, read, answers, probes)


def _tokens(
    models: Sequence[Model],
    domains: Mapping[str, Int[torch.Tensor, "b s"]],
    probes: Sequence[Probe],
    settings: AssessSettings,
) -> float:
    """Tokens that all parts read; what one cannot do is refused here, before the first one begins.

    Raises:
        ValueError: a text for recall is longer than a context.
    """
    total = 0.0
    for m in models:
        total += sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in domains.values())
        asked = [text for _, prompts in conditions(probes, settings.seed) for text in prompts]
        total += sum(len(m.codec.encode(text)) for text in asked)
        recalled = questions(m, settings.recall_texts, settings.recall_facts, settings.seed)
        total += sum(len(question.choice.prompt) for _, question in recalled)
        total += _DECODED * settings.answers * settings.max_new_tokens
    return total


def _subject(model: Model, probes: Sequence[Probe], settings: AssessSettings, work: _Work) -> Subject:
    work.begin(f"asking {model.name} {model.precision}")
    asked = ask(model, probes, settings.seed, work.add)
    work.begin(f"asking {model.name} {model.precision} what a text says")
    recalled = recall(model, settings.recall_texts, settings.recall_facts, settings.seed, work.add)
    return Subject(model.name, model.precision, str(model.runner().backend), asked, recalled)


def as_record(assessment: Assessment) -> dict[str, Any]:
    """The assessment as JSON values."""

    def subject(s: Subject) -> dict[str, Any]:
        conditions = {
            name: {"accuracy": a.accuracy, "confidence": a.confidence, "ece": a.ece, "flips": s.noise_flips(name)}
            for name, a in s.answers_by_condition.items()
        }
        return {
            "name": s.name, "dtype": s.dtype, "backend": s.backend,
            "probes": {"margin": s.clean.margin, "consistency": s.consistency, "copied": s.copied}
            | {"conditions": conditions, "relations": accuracy_by_relation(assessment.probes, s.clean)},
            "recall": s.recall,
        }  # fmt: skip

    return {
        "model": subject(assessment.model),
        "against": None if assessment.against is None else subject(assessment.against),
        "measures": assessment.measures(),
        "intervals": assessment.intervals(),
        "texts": asdict(assessment.texts),
        "answers": asdict(assessment.answers),
        "machine": describe_machine(),
    }


def write_assessment(folder: Path, assessment: Assessment, conditions: str) -> list[Path]:
    """Write `assess.json`, `report.md`, `report.html` and, where matplotlib is installed, charts."""
    charts: Mapping[str, bytes] = draw_charts(assessment) if find_spec("matplotlib") is not None else {}
    tables = sections(assessment)
    page = render_page(title(assessment), conditions, charts, tables, DEFINITIONS, describe_machine())
    pictures = {f"{caption.lower().replace(' ', '-')}.png": content for caption, content in charts.items()}
    return write_files(
        folder,
        {
            "assess.json": (json.dumps(as_record(assessment), indent=1) + "\n").encode(),
            "report.md": markdown_page(title(assessment), conditions, tables, DEFINITIONS).encode(),
            "report.html": page.encode(),
            **pictures,
        },
    )
