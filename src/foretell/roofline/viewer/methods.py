"""The answers about methods: their ranking, the gain of one by batch, cheaper passes, and requests that arrive."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from foretell.roofline.arrivals import LoadComparison, LoadResult, StepCosts, advice, drafts_text, load_costs, simulate
from foretell.roofline.drafter_cost import default_draft_model
from foretell.roofline.method_profiles import MethodProfile, cost_of_profile
from foretell.roofline.model_variants import model_variants
from foretell.roofline.plan import estimates_by_batch, profiles_for, rank_methods
from foretell.roofline.report import format_number, format_seconds
from foretell.roofline.speculation import MethodEstimate
from foretell.roofline.viewer.charts import Axes, Curve, chart
from foretell.roofline.viewer.settings import Arrivals, Drafts, Question


def methods_answer(question: Question, drafts: Drafts, parts: tuple[float, float]) -> dict[str, Any]:
    """The methods, best first, those that cannot be used last, and the variants with cheaper passes."""
    q = question
    plan = rank_methods(
        q.model, q.hardware, q.workload, drafts.profiles, drafts.draft_model, drafts.max_nodes, drafts.shape, q.offload
    )
    small = drafts.draft_model.name if drafts.draft_model else default_draft_model(q.model.name) or ""
    usable = [_method(e, small) for e in plan.estimates]
    unusable = [
        {"name": name, "title": why, "usable": False, "why": [f"{name}: {why}."]}
        for name, why in plan.unavailable.items()
    ]
    variants = model_variants(q.model, q.hardware, q.workload, *parts)
    outside = " Cheaper passes and arrivals are predicted without offloading." if q.offload else ""
    most = 1.02 * max([1.5, *(m["high"] for m in usable)])
    most_variant = 1.02 * max([1.5, *(v.speedup for v in variants)])
    return {
        "advice": plan.advice + outside,
        "methods": usable + unusable,
        "most": most,
        "variants": [
            {"title": v.title, "speedup": v.speedup, "text": f"{v.speedup:.2f}×"} for v in variants
        ],
        "mostVariant": most_variant,
    }  # fmt: skip


def _method(e: MethodEstimate, draft_model: str) -> dict[str, Any]:
    low, high = e.range
    return {
        "name": e.profile.name, "title": e.profile.title, "usable": True, "used": e.is_used, "speedup": e.speedup,
        "low": low, "high": high, "text": f"{e.speedup:.2f}×" if e.is_used else "no", "basis": e.profile.basis,
        "why": [_figures(e, draft_model), *_basis(e.profile)],
    }  # fmt: skip


def _figures(e: MethodEstimate, draft_model: str) -> str:
    """What the method comes to, in words."""
    if not e.is_used:
        return f"{e.profile.title}: drafting and the larger pass cost more than the tokens are worth here."
    low, high = e.range
    shape = f"{e.nodes - 1} drafted tokens, depth {e.depth}; " if e.nodes > 1 else ""
    drafting = format_seconds(e.draft_seconds) if e.draft_seconds else "free"
    by = f" with {draft_model}" if e.profile.draft in ("model", "block") else ""
    return (
        f"{e.profile.title}: {e.speedup:.2f}× ({low:.2f} to {high:.2f}); {shape}{e.tokens_per_pass:.2f} tokens per "
        f"pass. Pass {format_seconds(e.pass_seconds)} (plain {format_seconds(e.plain_seconds)}), drafting "
        f"{drafting}{by}."
    )


def _basis(profile: MethodProfile) -> tuple[str, str, str]:
    """What the acceptance rests on: a term of the glossary, what is said of it, and a command."""
    source = "your setting" if profile.basis == "given" else profile.acceptance.source
    return (
        "Acceptance",
        f" {profile.basis}: {source}. The range assumes that it varies by ±{100 * profile.spread:.0f} % between tasks, "
        "and the error of the runtime. ",
        f"foretell methods {profile.name}",
    )


def gain_answer(question: Question, drafts: Drafts, method: str) -> dict[str, Any]:
    """The speed-up of a method by batch, with its likely range."""
    q = question
    (profile,) = profiles_for(q.model, {method: drafts.profiles[method]}, drafts.draft_model).values()
    drafter = cost_of_profile(profile, q.model, drafts.draft_model)
    estimates = estimates_by_batch(
        profile, drafter, q.model, q.hardware, q.workload, q.offload, drafts.max_nodes, drafts.shape
    )
    curve = Curve(
        [(e.batch, e.speedup, True) for e in estimates],
        band=[(e.batch, max(0.0, e.range[0]), e.range[1]) for e in estimates],
    )
    at = next((e.speedup for e in estimates if e.batch == q.workload.batch), None)
    here = None if at is None else (q.workload.batch, at)
    axes = Axes("batch", "×, shaded: likely range", lambda v: f"{float(f'{v:.3g}'):g}", here, 1.0)
    return {"gain": chart([curve], axes)}


def arrival_costs(arrivals: Arrivals, drafts: Drafts, method: str) -> tuple[StepCosts, StepCosts]:
    """Steps of the server without and with drafts.

    Raises:
        ValueError: the method cannot be used.
    """
    q = arrivals.question
    return load_costs(drafts.profiles[method], q.model, q.hardware, q.workload, arrivals.shape, drafts.draft_model)


def compare_rate(arrivals: Arrivals, costs: tuple[StepCosts, StepCosts], rate: float) -> LoadComparison:
    """The requests of one rate, served without and with drafts."""
    requests = arrivals.at(rate)
    plain, drafted = (
        simulate(requests, each, arrivals.running, ttft_limit=arrivals.ttft, tpot_limit=arrivals.tpot) for each in costs
    )
    return LoadComparison(plain, drafted)


def load_answer(
    rates: Sequence[float], compared: Sequence[LoadComparison], drafted: StepCosts, method: str
) -> dict[str, Any]:
    """What the requests of all rates saw: one sentence, the mean time of an answer, and the goodput."""
    by_rate = sorted(zip(rates, compared, strict=True), key=lambda pair: pair[0])

    def curves(figure: Callable[[LoadResult], float]) -> list[Curve]:
        def points(kind: str) -> list[tuple[float, float, bool]]:
            results = [(rate, getattr(c, kind)) for rate, c in by_rate]
            return [(r.rate if math.isfinite(r.rate) else rate, figure(r), True) for rate, r in results]

        return [Curve(points("drafted"), "drafts"), Curve(points("plain"), "plain", True)]

    latency = Axes("requests/s", "mean time of an answer", format_seconds, logarithmic=True, dots=True)
    goodput = Axes("requests/s", "goodput, requests/s", format_number, dots=True)
    return {
        "advice": f"{advice(compared)} {drafts_text(method, drafted)}.",
        "latency": chart(curves(lambda r: r.mean_latency), latency),
        "goodput": chart(curves(lambda r: r.goodput), goodput),
    }
