"""All metrics of a run, as written to `results.json`."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from foretell.bench.competitor import PLAIN
from foretell.bench.machine import describe_machine
from foretell.bench.metrics import (
    DEFINITIONS,
    category_means,
    compute_metrics,
    mean_fidelity_loss,
    question_metrics,
    spec_bench_metrics,
)
from foretell.bench.peers.registry import is_peer
from foretell.bench.schema import BenchResults, BenchSettings, CompetitorResult, QuestionResult


def build_results(
    results: Sequence[QuestionResult],
    settings: BenchSettings,
    lossless: Mapping[str, bool],
    memory: Mapping[str, int] | None = None,
) -> BenchResults:
    """Metrics of a run. `lossless`: its competitors in order; `memory`: their peaks in bytes where measured."""
    by_name = {name: [r for r in results if r.competitor == name] for name in lossless}
    first_plain = by_name.get(f"{PLAIN}/{settings.dtypes[0]}", [])
    peers = {n: rs for n, rs in by_name.items() if is_peer(n)}
    competitors = []
    for name, mine in by_name.items():
        same_precision = None if is_peer(name) else by_name.get(f"{PLAIN}/{name.split('/')[1]}")
        plain = first_plain if same_precision is None else same_precision
        competitors.append(_competitor_result(name, mine, plain, peers, lossless[name], (memory or {}).get(name)))
    return BenchResults(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(settings.device),
        settings=settings,
        repeats=1 + max((r.repeat for r in results), default=0),
        definitions=DEFINITIONS,
        competitors=tuple(competitors),
    )


def _competitor_result(
    name: str,
    mine: Sequence[QuestionResult],
    plain: Sequence[QuestionResult],
    peers: Mapping[str, Sequence[QuestionResult]],
    lossless: bool,
    memory: int | None,
) -> CompetitorResult:
    categories = {}
    for category in dict.fromkeys(r.category for r in mine if r.error is None):

        def select(results: Sequence[QuestionResult], category: str = category) -> list[QuestionResult]:
            return [r for r in results if r.category == category]

        peers_here = {n: select(rs) for n, rs in peers.items()}
        categories[category] = compute_metrics(select(mine), select(plain), peers_here)
    compared = [r for r in mine if r.compared]
    return CompetitorResult(
        name=name,
        peer=is_peer(name),
        lossless=lossless,
        categories=categories,
        pooled=compute_metrics(mine, plain, peers),
        category_means=category_means(list(categories.values())),
        spec_bench=spec_bench_metrics(mine, plain),
        identical=sum(r.divergence is None for r in compared),
        compared=len(compared),
        divergences=tuple(r.divergence for r in compared if r.divergence is not None),
        errors={r.question: r.error for r in mine if r.error is not None},
        fidelity=mean_fidelity_loss(mine),
        peak_memory_bytes=memory,
        per_question=tuple(question_metrics(mine)),
    )
