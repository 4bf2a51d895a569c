"""Runs the ways interleaved, prices them, and keeps what is finished."""

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
from foretell.bench.schema import BenchSettings, FrozenModel, QuestionMetrics, QuestionResult
from foretell.lab.frontier.predict import DTYPE_FORMATS, Predictor
from foretell.lab.frontier.price import WayPrice, bytes_gain, price_of_method, price_of_model
from foretell.lab.frontier.ways import ModelOptions, Way
from foretell.load import load
from foretell.roofline.hardware import Hardware
from foretell.utils.store import RunStore

ANSWERS, PRICES = "answers", "prices"
"""Folders of a run below its own."""


class WayResult(FrozenModel):
    """A row of the price list; `gain`: speed over that of plain decoding of the exact model."""

    price: WayPrice
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
    """The ways that can be run, with their models. `unavailable`: the others, with the reason."""

    exact: Model
    ways: list[Way]
    competitors: list[Competitor]
    models: dict[str, Model]
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Which methods use the draft model that was named for all of them."""


def open_ways(ways: Sequence[Way], exact: ModelOptions, device: str, max_new_tokens: int) -> Frontier:
    """Load every model once, and build the method of every way."""
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
    found = Frontier(model_of(exact), [], [plain], {})
    for way in ways:
        try:
            model = model_of(way.options)
            drafts = load_drafts(",".join(way.drafts), model.precision, device)
            competitor = MethodCompetitor(model, way.spec, settings, drafts, own_drafts=way.family == "exits")
        except ValueError as error:
            found.unavailable[way.name] = " ".join(str(error).split())
            continue
        competitor.name = way.competitor
        found.ways.append(way)
        found.competitors.append(competitor)
        found.models[way.competitor] = model
    found.notes = use_of_inputs([c for c in found.competitors if isinstance(c, MethodCompetitor)])
    return found


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
) -> list[WayResult]:
    """Run, price and predict all ways; what an interrupted run in the same folder has finished is kept."""
    with (
        RunStore(out / ANSWERS, settings, QuestionResult) as answers,
        RunStore(out / PRICES, settings, WayPrice) as prices,
    ):
        BenchRun(frontier.competitors, {"exact": frontier.exact}, repeats).run(questions, answers, report)
        known = {f"{price.way}/{price.family}": price for price in prices.records}
        wanted = {q.id for q in questions}
        by_name: dict[str, list[QuestionResult]] = {c.name: [] for c in frontier.competitors}
        for record in answers.records:
            if record.question in wanted and record.competitor in by_name and record.repeat < repeats:
                by_name[record.competitor].append(record)
        _leave_out_failed(frontier, by_name)
        for way in frontier.ways:
            if way.competitor not in known:
                report(f"pricing {way.name}")
                found = _price(frontier, way, by_name[way.competitor], questions, settings)
                known[way.competitor] = found
                prices.append(found)
    plain = question_metrics(by_name[frontier.competitors[0].name])
    if predicted is not None and (speed := tokens_per_second(plain)):
        predicted = predicted.anchored(1 / speed)
    gains = {
        way.competitor: way.predict(_informed(predicted, way, by_name, frontier)) if predicted else None
        for way in frontier.ways
    }
    return [
        _result(known[way.competitor], gains[way.competitor], by_name[way.competitor], plain) for way in frontier.ways
    ]


def _informed(
    predicted: Predictor, way: Way, results: Mapping[str, Sequence[QuestionResult]], frontier: Frontier
) -> Predictor:
    """The predictor with what only a run can tell of a way: which of its drafts are accepted."""
    mine, plain = results[way.competitor], results[frontier.competitors[0].name]
    if not way.family.endswith("method"):
        return predicted
    pooled, base = (compute_metrics(found, plain, {}) for found in (mine, plain))
    variant, dtype = way.spec.label, predicted.exact_dtype
    return replace(predicted, measured=measured_method(variant, dtype, way.options.model, pooled, base, "this run"))


def _leave_out_failed(frontier: Frontier, results: Mapping[str, Sequence[QuestionResult]]) -> None:
    """Move the ways that answered no question, or with one token at most, to the unavailable ones.

    Raises:
        ValueError: the exact model answered none.
    """
    errors = {name: next(iter(r.error for r in found if r.repeat == 0), None) for name, found in results.items()}
    failed = {name for name, found in results.items() if all(r.error is not None for r in found)}
    short = {name for name, found in results.items() if not any(len(a.tokens) > 1 for r in found for a in r.answers)}
    errors |= dict.fromkeys(short - failed, "its answers end after one token, so there is nothing to compare")
    failed |= short
    first = frontier.competitors[0].name
    if first in failed:
        raise ValueError(f"plain decoding answered no question: {errors[first]}")
    frontier.unavailable |= {w.name: errors[w.competitor] or "" for w in frontier.ways if w.competitor in failed}
    frontier.ways = [w for w in frontier.ways if w.competitor not in failed]


def _price(
    frontier: Frontier,
    way: Way,
    results: Sequence[QuestionResult],
    questions: Sequence[Question],
    settings: BenchSettings,
) -> WayPrice:
    first = [r for r in results if r.repeat == 0 and r.error is None]
    asked: Mapping[str, Question] = {q.id: q for q in questions}
    model, competitor = frontier.models[way.competitor], _of(frontier, way)
    changed = model is not frontier.exact
    if changed:
        found = price_of_model(way, model, frontier.exact, first, asked)
    else:
        sampling = GenerationSettings(settings.max_new_tokens, 1.0, settings.seed)
        found = price_of_method(way, frontier.exact, first, asked, sampling)
    tokens = sum(len(a.tokens) for r in first for a in r.answers)
    passes = sum(a.passes for r in first for a in r.answers)
    context = sum(r.answers[0].prompt_tokens for r in first) // len(first)
    known = changed or competitor.lossless
    return WayPrice(
        way=way.name, family=way.family, lossless=competitor.lossless and not changed,
        bytes_gain=bytes_gain(way, model, frontier.exact, context, passes / tokens) if known else None, **found,
    )  # fmt: skip


def _of(frontier: Frontier, way: Way) -> Competitor:
    return next(c for c in frontier.competitors if c.name == way.competitor)


def _result(
    price: WayPrice, predicted: float | None, results: Sequence[QuestionResult], plain: Sequence[QuestionMetrics]
) -> WayResult:
    compared = [r for r in results if r.compared]
    return WayResult(
        price=price.model_copy(update={"predicted_gain": predicted}),
        gain=speed_ratio(question_metrics(results), plain),
        changed_answers=sum(r.divergence is not None for r in compared) / len(compared) if compared else None,
        error=next((r.error for r in results if r.error is not None), None),
    )
