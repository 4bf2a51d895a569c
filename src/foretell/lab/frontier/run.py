"""Runs the variants interleaved, measures how they diverge from the exact model, and keeps what is finished."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from foretell.api import Model
from foretell.bench.competitor import (
    PLAIN,
    Competitor,
    GenerationSettings,
    MethodCompetitor,
    MethodSpec,
    load_drafts,
    use_of_inputs,
)
from foretell.bench.measured_method import measured_method
from foretell.bench.metrics import compute_metrics, question_metrics, speed_ratio, tokens_per_second
from foretell.bench.questions import Question
from foretell.bench.run import BenchRun
from foretell.bench.schema import BenchSettings, QuestionMetrics, QuestionResult
from foretell.lab.frontier.divergence import VariantDivergence, bytes_gain, divergence_of_method, divergence_of_model
from foretell.lab.frontier.predict import DTYPE_FORMATS, Predictor
from foretell.lab.frontier.variants import ModelOptions, Variant
from foretell.load import load
from foretell.roofline.hardware import Hardware
from foretell.utils.store import RunStore
from foretell.utils.validation import FrozenModel

ANSWERS, DIVERGENCES = "answers", "prices"
"""Folders of a run below its own."""


class VariantResult(FrozenModel):
    """A row of the table; `gain`: speed over that of plain decoding of the exact model."""

    price: VariantDivergence
    gain: float | None
    changed_answers: float | None
    error: str | None = None

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured gain, less one."""
        if self.gain is None or self.price.predicted_gain is None:
            return None
        return self.price.predicted_gain / self.gain - 1


@dataclass
class Frontier:
    """The variants that can be run, with their models. `unavailable`: the others, with the reason."""

    exact: Model
    variants: list[Variant]
    competitors: list[Competitor]
    models: dict[str, Model]
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Which methods use the draft model that was named for all of them."""


def open_variants(variants: Sequence[Variant], exact: ModelOptions, device: str, max_new_tokens: int) -> Frontier:
    """Load every model once, and build the method of every variant."""
    settings, loaded = GenerationSettings(max_new_tokens), dict[ModelOptions, Model]()

    def model_of(options: ModelOptions) -> Model:
        if options not in loaded:
            loaded[options] = load(
                options.model, options.dtype, device, kv_cache_dtype=options.kv_cache_dtype,
                kv_cache_policy=options.kv_cache_policy, sparsity=options.sparsity,
            )  # fmt: skip
            loaded[options].cache_checkpoint()
        return loaded[options]

    plain = MethodCompetitor(model_of(exact), MethodSpec.parse(PLAIN), settings)
    plain.name = f"{PLAIN}/exact"
    frontier = Frontier(model_of(exact), [], [plain], {})
    for variant in variants:
        try:
            model = model_of(variant.options)
            drafts = load_drafts(",".join(variant.drafts), model.precision, device)
            competitor = MethodCompetitor(model, variant.spec, settings, drafts, own_drafts=variant.family == "exits")
        except ValueError as error:
            frontier.unavailable[variant.name] = " ".join(str(error).split())
            continue
        competitor.name = variant.competitor
        frontier.variants.append(variant)
        frontier.competitors.append(competitor)
        frontier.models[variant.competitor] = model
    frontier.notes = use_of_inputs([c for c in frontier.competitors if isinstance(c, MethodCompetitor)])
    return frontier


def predictor(hardware: Hardware | None, exact: Model, context: int) -> Predictor | None:
    """What predicts the gains, if the device is known and the roofline has formats of the exact model's dtype."""
    if hardware is None or exact.precision not in DTYPE_FORMATS:
        return None
    return Predictor(hardware, exact.config, exact.precision, context)


def run_frontier(
    frontier: Frontier,
    settings: BenchSettings,
    questions: Sequence[Question],
    repeats: int,
    predicted: Predictor | None,
    out: Path,
    report: Callable[[str], None],
) -> list[VariantResult]:
    """Run, measure and predict all variants; what an interrupted run in the same folder has finished is kept."""
    with (
        RunStore(out / ANSWERS, settings, QuestionResult) as answers,
        RunStore(out / DIVERGENCES, settings, VariantDivergence) as divergences,
    ):
        BenchRun(frontier.competitors, {"exact": frontier.exact}, repeats).run(questions, answers, report)
        known = {f"{record.way}/{record.family}": record for record in divergences.records}
        wanted = {q.id for q in questions}
        by_name: dict[str, list[QuestionResult]] = {c.name: [] for c in frontier.competitors}
        for record in answers.records:
            if record.question in wanted and record.competitor in by_name and record.repeat < repeats:
                by_name[record.competitor].append(record)
        _leave_out_failed(frontier, by_name)
        for variant in frontier.variants:
            if variant.competitor not in known:
                report(f"comparing {variant.name}")
                divergence = _divergence(frontier, variant, by_name[variant.competitor], questions, settings)
                known[variant.competitor] = divergence
                divergences.append(divergence)
    plain = question_metrics(by_name[frontier.competitors[0].name])
    if predicted is not None and (speed := tokens_per_second(plain)):
        predicted = predicted.anchored(1 / speed)
    gains = {
        variant.competitor: variant.predict(_informed(predicted, variant, by_name, frontier)) if predicted else None
        for variant in frontier.variants
    }
    return [
        _result(known[variant.competitor], gains[variant.competitor], by_name[variant.competitor], plain)
        for variant in frontier.variants
    ]


def _informed(
    predicted: Predictor, variant: Variant, results: Mapping[str, Sequence[QuestionResult]], frontier: Frontier
) -> Predictor:
    """The predictor with what only a run can tell of a variant: which of its drafts are accepted."""
    mine, plain = results[variant.competitor], results[frontier.competitors[0].name]
    if not variant.family.endswith("method"):
        return predicted
    pooled, base = (compute_metrics(answers, plain, {}) for answers in (mine, plain))
    label, dtype = variant.spec.label, predicted.exact_dtype
    return replace(predicted, measured=measured_method(label, dtype, variant.options.model, pooled, base, "this run"))


def _leave_out_failed(frontier: Frontier, results: Mapping[str, Sequence[QuestionResult]]) -> None:
    """Move the variants that answered no question, or with one token at most, to the unavailable ones."""
    errors = {name: next(iter(r.error for r in answered if r.repeat == 0), None) for name, answered in results.items()}
    failed = {name for name, answered in results.items() if all(r.error is not None for r in answered)}
    short = {
        name for name, answered in results.items() if not any(len(a.tokens) > 1 for r in answered for a in r.answers)
    }
    errors |= dict.fromkeys(short - failed, "its answers end after one token, so there is nothing to compare")
    failed |= short
    first = frontier.competitors[0].name
    if first in failed:
        raise ValueError(f"plain decoding answered no question: {errors[first]}")
    frontier.unavailable |= {v.name: errors[v.competitor] or "" for v in frontier.variants if v.competitor in failed}
    frontier.variants = [v for v in frontier.variants if v.competitor not in failed]


def _divergence(
    frontier: Frontier,
    variant: Variant,
    results: Sequence[QuestionResult],
    questions: Sequence[Question],
    settings: BenchSettings,
) -> VariantDivergence:
    first = [r for r in results if r.repeat == 0 and r.error is None]
    asked: Mapping[str, Question] = {q.id: q for q in questions}
    model = frontier.models[variant.competitor]
    competitor = next(c for c in frontier.competitors if c.name == variant.competitor)
    changed = model is not frontier.exact
    if changed:
        divergences = divergence_of_model(variant, model, frontier.exact, first, asked)
    else:
        sampling = GenerationSettings(settings.max_new_tokens, 1.0, settings.seed)
        divergences = divergence_of_method(variant, frontier.exact, first, asked, sampling)
    tokens = sum(len(a.tokens) for r in first for a in r.answers)
    passes = sum(a.passes for r in first for a in r.answers)
    context = sum(r.answers[0].prompt_tokens for r in first) // len(first)
    known = changed or competitor.lossless
    return VariantDivergence(
        way=variant.name, family=variant.family, lossless=competitor.lossless and not changed,
        bytes_gain=bytes_gain(variant, model, frontier.exact, context, passes / tokens) if known else None,
        **divergences,
    )  # fmt: skip


def _result(
    divergence: VariantDivergence,
    predicted: float | None,
    results: Sequence[QuestionResult],
    plain: Sequence[QuestionMetrics],
) -> VariantResult:
    compared = [r for r in results if r.compared]
    return VariantResult(
        price=divergence.model_copy(update={"predicted_gain": predicted}),
        gain=speed_ratio(question_metrics(results), plain),
        changed_answers=sum(r.divergence is not None for r in compared) / len(compared) if compared else None,
        error=next((r.error for r in results if r.error is not None), None),
    )
