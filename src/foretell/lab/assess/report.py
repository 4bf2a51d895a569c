"""The report of an assessment: what was found, in tables, and in single measures that a budget may bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretell.bench.text_table import Cell, TextTable
from foretell.lab.assess.answers import AnswerAssessment
from foretell.lab.assess.fidelity import TextAssessment
from foretell.lab.assess.intervals import Interval, share_interval
from foretell.lab.assess.noise import NOISES
from foretell.lab.assess.probes import CLEAN, DISTRACTOR, PARAPHRASE, Probe, ProbeAnswers, accuracy_by_relation
from foretell.utils.names import unknown

DEFINITIONS: Mapping[str, str] = {
    "KL": "mean of KL(other || model) of the next token over the positions of a text that people wrote, in nats.",
    "TV": "total variation, half the sum of the differences of the two distributions: the least share of sampled "
    "tokens that changes.",
    "same top": "share of positions where both models find the same token most probable.",
    "perplexity": "exponential of the mean cross-entropy of the text.",
    "ECE": "expected calibration error in 15 bins of equal width: how far the probability of the most probable token "
    "(of a probe: of the chosen candidate among the candidates) is from the share of cases in which it is right.",
    "Brier": "mean squared error of the next-token distribution.",
    "probes": "the candidate of the highest log-probability behind the prompt counts as the answer.",
    "margin": "log-probability of the right candidate minus that of the best wrong one, mean over the probes.",
    "consistency": "share of probes that get the same answer in other words.",
    "flips": "share of probes whose chosen candidate changes: by the noise, or from the other model to this one.",
    "copied": "share of probes that answer with the wrong candidate that a sentence before the prompt names.",
    "recall": "share of invented facts in a text that are found again among four names, by the place of the fact.",
    "intervals": "paired bootstrap over stretches of 64 positions and over probes, 2000 resamples.",
    "answers": "greedy answers to built-in questions; repeated: sequences of 4 tokens that an answer holds twice.",
}

MEASURES = (
    "perplexity", "ece", "probe_errors", "probe_ece", "noise_flips", "copied", "recall_errors", "repeated"
)  # fmt: skip
"""Names of the single measures of a model alone."""
CHANGES = (
    "kl", "kl_worst_domain", "total_variation", "changed_tokens", "perplexity_ratio", "ece_change", "probe_flips",
    "new_errors", "new_error_confidence", "noise_flips_change", "changed_answers",
)  # fmt: skip
"""Names of the single measures beside another model."""


@dataclass(frozen=True)
class Subject:
    """A model as it was loaded, and what was measured of it alone."""

    name: str
    dtype: str
    backend: str
    answers_by_condition: Mapping[str, ProbeAnswers]
    recall: Mapping[str, float]

    @property
    def clean(self) -> ProbeAnswers:
        """Answers to the probes as written."""
        return self.answers_by_condition[CLEAN]

    @property
    def consistency(self) -> float:
        """Share of probes that get the same answer in other words."""
        return 1 - self.clean.flips(self.answers_by_condition[PARAPHRASE])

    def noise_flips(self, condition: str) -> float:
        """Share of probes whose answer a condition changes."""
        return self.clean.flips(self.answers_by_condition[condition])

    @property
    def mean_noise_flips(self) -> float:
        """Mean over the kinds of noise."""
        return sum(map(self.noise_flips, NOISES)) / len(NOISES)

    @property
    def copied(self) -> float:
        """Share of probes that are answered with the wrong candidate named before."""
        chosen = self.answers_by_condition[DISTRACTOR].chosen
        return sum(c == 1 for c in chosen) / len(chosen)


@dataclass(frozen=True)
class Assessment:
    """All that was found of a model, beside another one where `against` is given."""

    model: Subject
    against: Subject | None
    texts: TextAssessment
    answers: AnswerAssessment
    probes: tuple[Probe, ...]

    def measures(self) -> dict[str, float]:
        """Single measures, all of them better when lower; those of a change only beside another model."""
        own, clean = self.model, self.model.clean
        values = [
            self.texts.overall.perplexity,
            self.texts.overall.ece,
            1 - clean.accuracy,
            clean.ece,
            own.mean_noise_flips,
            own.copied,
            1 - sum(own.recall.values()) / len(own.recall),
            self.answers.repeated,
        ]
        alone = dict(zip(MEASURES, values, strict=True))
        return alone if self.against is None else alone | self._changes(self.against)

    def _changes(self, other: Subject) -> dict[str, float]:
        texts, compared, theirs = self.texts, self.texts.compared.values(), self.texts.other
        assert theirs is not None and self.answers.equal is not None
        total, before, now = sum(c.tokens for c in compared), other.clean, self.model.clean
        new_errors = before.new_errors(now)
        values = [
            texts.mean_kl,
            max(c.kl for c in compared),
            sum(c.total_variation * c.tokens for c in compared) / total,
            1 - sum(c.same_top * c.tokens for c in compared) / total,
            texts.overall.perplexity / theirs.perplexity,
            texts.overall.ece - theirs.ece,
            before.flips(now),
            len(new_errors) / len(self.probes),
            sum(new_errors) / len(new_errors) if new_errors else 0.0,
            self.model.mean_noise_flips - other.mean_noise_flips,
            1 - self.answers.equal,
        ]
        return dict(zip(CHANGES, values, strict=True))

    def intervals(self) -> dict[str, Interval]:
        """Where changes lie at a confidence of 95 %, by paired bootstrap over texts and probes; empty without another
        model.
        """
        if self.against is None:
            return {}
        before, now = self.against.clean.chosen, self.model.clean.chosen
        pairs = list(zip(before, now, strict=True))
        return dict(self.texts.intervals) | {
            "probe_flips": share_interval([a != b for a, b in pairs]),
            "new_errors": share_interval([a == 0 != b for a, b in pairs]),
        }


def check_budgets(budgets: Mapping[str, float], compared: bool) -> None:
    """Refuse budgets for measures that are not taken; `compared`: there is another model.

    Raises:
        ValueError: there is such a budget.
    """
    for name in budgets:
        if name in CHANGES and not compared:
            raise ValueError(f"--budget {name}: a change is measured beside another model; name one with --against")
        if name not in (*MEASURES, *CHANGES):
            raise unknown("measure", name, (*MEASURES, *CHANGES))


def broken_budgets(measures: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """One sentence per measure that is above its budget."""
    return [
        f"{name} is {measures[name]:.4g}, above its budget of {most:g}"
        for name, most in budgets.items()
        if measures[name] > most
    ]


def sections(assessment: Assessment) -> dict[str, TextTable]:
    """Tables by title."""
    tables = {"Changes, with 95 % intervals": _changes(assessment)} if assessment.against is not None else {}
    return tables | {
        "Texts": _texts(assessment),
        "Calibration of the next token": _calibration(assessment),
        "Knowledge probes": _probes(assessment),
        "Right answers by relation": _relations(assessment),
        "Noise in the prompt": _noise(assessment),
        "Recall from a text": _recall(assessment),
        "Greedy answers": _answers(assessment),
    }


def _changes(assessment: Assessment) -> TextTable:
    values = assessment.measures()
    rows = [[n, f"{values[n]:.4f}", f"{low:.4f}", f"{high:.4f}"] for n, (low, high) in assessment.intervals().items()]
    return TextTable(["measure", "value", "from", "to"], rows)


def title(assessment: Assessment) -> str:
    """What was assessed, in a line."""
    of = f"Assessment of {label(assessment.model)}"
    return of if assessment.against is None else f"{of} (model) beside {label(assessment.against)} (other)"


def _names(assessment: Assessment) -> list[str]:
    if assessment.against is None:
        return ["model"]
    return ["model", "other"]


def label(subject: Subject) -> str:
    """Short name of a model with its dtype."""
    return f"{subject.name.rstrip('/').rsplit('/', 1)[-1]} {subject.dtype}"


def _subjects(assessment: Assessment) -> list[Subject]:
    return [assessment.model] if assessment.against is None else [assessment.model, assessment.against]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _texts(assessment: Assessment) -> TextTable:
    rows: list[list[Cell]] = []
    for name, c in assessment.texts.domains.items():
        row: list[Cell] = [name, c.tokens, c.perplexity, f"{c.ece:.3f}"]
        if name in assessment.texts.compared:
            other = assessment.texts.compared[name]
            row += [other.perplexity, f"{c.perplexity / other.perplexity:.4f}", f"{other.kl:.4f}"]
            row += [f"{other.total_variation:.4f}", _percent(other.same_top)]
        rows.append(row)
    more = ["other's", "ratio", "KL", "TV", "same top"] if assessment.texts.compared else []
    return TextTable(["text", "positions", "perplexity", "ECE", *more], rows)


def _calibration(assessment: Assessment) -> TextTable:
    each = [assessment.texts.overall] + ([assessment.texts.other] if assessment.texts.other is not None else [])
    rows: list[list[Cell]] = [
        ["perplexity", *(f"{c.perplexity:.3f}" for c in each)],
        ["most probable token is right", *(_percent(c.accuracy) for c in each)],
        ["mean confidence", *(_percent(c.confidence) for c in each)],
        ["ECE", *(f"{c.ece:.4f}" for c in each)],
        ["Brier", *(f"{c.brier:.4f}" for c in each)],
    ]
    return TextTable(["measure", *_names(assessment)], rows)


def _probes(assessment: Assessment) -> TextTable:
    each = _subjects(assessment)
    chance = sum(1 / len(p.candidates) for p in assessment.probes) / len(assessment.probes)
    rows: list[list[Cell]] = [
        [f"right of {len(assessment.probes)} (chance {chance:.0%})", *(_percent(s.clean.accuracy) for s in each)],
        ["mean confidence", *(_percent(s.clean.confidence) for s in each)],
        ["ECE", *(f"{s.clean.ece:.3f}" for s in each)],
        ["margin, nats", *(f"{s.clean.margin:.2f}" for s in each)],
        ["consistency", *(_percent(s.consistency) for s in each)],
    ]
    if assessment.against is not None:
        before, after = assessment.against.clean, assessment.model.clean
        pairs = list(zip(before.chosen, after.chosen, strict=True))
        wrong, right = (sum(bool(a) != bool(b) and bool(b) is w for a, b in pairs) for w in (True, False))
        errors = before.new_errors(after)
        rows += [
            ["other candidate chosen (flips)", _percent(before.flips(after)), None],
            ["right before, wrong now", wrong, None],
            ["wrong before, right now", right, None],
            ["confidence of these new errors", _percent(sum(errors) / len(errors)) if errors else None, None],
        ]
    return TextTable(["measure", *_names(assessment)], rows)


def _relations(assessment: Assessment) -> TextTable:
    each = [accuracy_by_relation(assessment.probes, s.clean) for s in _subjects(assessment)]
    return TextTable(["relation", *_names(assessment)], [[r, *(_percent(a[r]) for a in each)] for r in each[0]])


def _noise(assessment: Assessment) -> TextTable:
    each = _subjects(assessment)
    rows: list[list[Cell]] = []
    for condition, answers in assessment.model.answers_by_condition.items():
        row: list[Cell] = [condition, _percent(answers.accuracy), _percent(assessment.model.noise_flips(condition))]
        if assessment.against is not None:
            theirs = assessment.against.answers_by_condition[condition]
            row += [_percent(theirs.accuracy), _percent(assessment.against.noise_flips(condition))]
        rows.append(row)
    rows.append(["copied from it", *(c for s in each for c in (_percent(s.copied), None))])
    names = ["right", "flips", "other: right", "other: flips"][: 2 * len(each)]
    return TextTable(["prompt", *names], rows)


def _recall(assessment: Assessment) -> TextTable:
    each = _subjects(assessment)
    return TextTable(
        ["place", *_names(assessment)], [[p, *(_percent(s.recall[p]) for s in each)] for p in each[0].recall]
    )


def _answers(assessment: Assessment) -> TextTable:
    a = assessment.answers
    rows: Sequence[tuple[str, Cell]] = [
        ("answers", a.answers),
        ("ended before the limit", _percent(a.ended)),
        ("repeated", _percent(a.repeated)),
        ("equal to the other's", _percent(a.equal)),
        ("tokens before the first difference", _percent(a.kept_tokens)),
        ("median place of the first difference", a.median_difference),
    ]
    return TextTable(["measure", "value"], [[name, value] for name, value in rows if value is not None])
