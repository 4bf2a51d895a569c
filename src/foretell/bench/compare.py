"""Compare two results question by question, with bootstrap confidence intervals of the ratios."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.bench.schema import BenchResults, CompetitorResult, QuestionMetrics

RESAMPLES = 4000
"""Bootstrap samples."""


@dataclass(frozen=True)
class Comparison:
    """One metric of one competitor in one category (`all`: pooled): both values, and the interval of their ratio."""

    competitor: str
    category: str
    metric: str
    a: float
    b: float
    low: float
    high: float
    questions: int

    @property
    def ratio(self) -> float:
        """Second over first."""
        return self.b / self.a

    @property
    def verdict(self) -> str:
        """Whether the second value is higher or lower, as far as the interval decides it."""
        if self.questions < 2:
            return "–"
        if self.low <= 1 <= self.high:
            return "unclear"
        return "higher" if self.low > 1 else "lower"


Pair = tuple[QuestionMetrics, QuestionMetrics]
_METRICS: dict[str, tuple[Callable[[QuestionMetrics], float], Callable[[QuestionMetrics], float]]] = {
    "tokens per pass": (lambda q: q.tokens, lambda q: q.passes),
    "tokens/s": (lambda q: q.decode_tokens, lambda q: q.decode_seconds),
}


def compare(a: BenchResults, b: BenchResults, confidence: float = 0.95, seed: int = 0) -> list[Comparison]:
    """Resample the questions that a competitor answered in both results (percentile bootstrap).

    Raises:
        ValueError: they share no competitor or no question.
    """
    common = _common_competitors(a, b)
    if not common:
        theirs = [c.name for c in b.competitors]
        raise ValueError(
            f"the two results share no competitor: {', '.join(c.name for c in a.competitors)} and {', '.join(theirs)}"
        )
    out = []
    for mine, other in common:
        second = {q.question: q for q in other.per_question}
        pairs = [(q, second[q.question]) for q in mine.per_question if q.question in second]
        categories = dict.fromkeys(q.category for q, _ in pairs)
        for category in ("all", *categories) if len(categories) > 1 else ("all",):
            here = [p for p in pairs if category in ("all", p[0].category)]
            for metric in _METRICS:
                comparison = _compare_metric(mine.name, category, metric, here, confidence, np.random.default_rng(seed))
                out += [comparison] if comparison else []
    if not out:
        raise ValueError("the two results share no question: do they come from different question files?")
    return out


def _common_competitors(a: BenchResults, b: BenchResults) -> list[tuple[CompetitorResult, CompetitorResult]]:
    """Competitors of the same name; if there are none, those of the same method in different precisions."""
    theirs = {c.name: c for c in b.competitors}
    same_name = [(c, theirs[c.name]) for c in a.competitors if c.name in theirs]
    by_method = {c.name.split("/")[0]: c for c in b.competitors if not c.peer}
    mine = {c.name.split("/")[0]: c for c in a.competitors if not c.peer}
    return same_name or [(c, by_method[name]) for name, c in mine.items() if name in by_method]


def _compare_metric(
    competitor: str, category: str, metric: str, pairs: Sequence[Pair], confidence: float, random: np.random.Generator
) -> Comparison | None:
    numerator, denominator = _METRICS[metric]
    values = np.array([[numerator(x), denominator(x), numerator(y), denominator(y)] for x, y in pairs], float).reshape(
        -1, 4
    )
    sums = values.sum(0)
    if not sums.all():
        return None
    drawn = values[random.integers(0, len(values), (RESAMPLES, len(values)))].sum(1)
    of_a, by_a, of_b, by_b = drawn[(drawn > 0).all(1)].T
    ratios = (of_b / by_b) / (of_a / by_a)
    low, high = np.percentile(ratios, [50 * (1 - confidence), 50 * (1 + confidence)])
    return Comparison(
        competitor, category, metric, sums[0] / sums[1], sums[2] / sums[3], float(low), float(high), len(pairs)
    )


def settings_differences(a: BenchResults, b: BenchResults) -> list[str]:
    """One sentence per setting that differs."""
    first, second = a.settings.model_dump(), b.settings.model_dump()
    return [f"note: {key} differs ({first[key]} and {second[key]})" for key in first if first[key] != second[key]]
