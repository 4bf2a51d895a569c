"""Results of `foretell bench run` for `foretell roofline`: the acceptance of its methods."""

from dataclasses import replace
from pathlib import Path

from foretell.bench.measured_method import measured_method
from foretell.bench.output import read_results
from foretell.bench.schema import BenchResults
from foretell.roofline.measured import PLAIN, MeasuredMethod
from foretell.roofline.method_profiles import profile_of_method


def read_measured(path: Path) -> tuple[BenchResults, list[MeasuredMethod]]:
    """Results and their methods of the catalogue, in order; one method may come with several number formats.

    Raises:
        ValueError: no results, or none of a drafting method.
    """
    results = read_results(path)
    methods = list[MeasuredMethod]()
    plain = {c.name: c.pooled for c in results.competitors}
    for competitor in results.competitors:
        variant, _, dtype = competitor.name.partition("/")
        if competitor.peer or variant.partition("@")[0] not in profile_of_method():
            continue
        pooled, model = competitor.pooled, results.settings.model
        source = f"{path}, {pooled.questions} questions, {results.created[:10]}"
        base = plain.get(f"{PLAIN}/{dtype}", pooled)
        if (method := measured_method(variant, dtype, model, pooled, base, source)) is not None:
            methods.append(method)
    if not methods:
        raise ValueError(f"{path} has no results of a drafting method; run `foretell bench run --method NAME`")
    return results, methods


def read_held_out(path: Path, passes: Path) -> tuple[BenchResults, list[MeasuredMethod]]:
    """Results with the speed-ups of `path`, and the acceptance and passes of the same methods of `passes`.

    Raises:
        ValueError: as `read_measured`; the two have a question in common, or no method.
    """
    (results, methods), (others, seen) = read_measured(path), read_measured(passes)
    if both := _questions(results) & _questions(others):
        raise ValueError(
            f"{path} and {passes} share {len(both)} questions; choose others, so that the speed-ups are of unseen ones"
        )
    speedups = {(m.variant, m.model): m.speedup for m in methods}
    known = [replace(m, speedup=speedups[m.variant, m.model]) for m in seen if (m.variant, m.model) in speedups]
    if not known:
        raise ValueError(f"{path} and {passes} have no method of the same model in common")
    return results, known


def _questions(results: BenchResults) -> set[tuple[str, str]]:
    """The file and the name of every question of a run."""
    return {(results.settings.digest, q.question) for c in results.competitors for q in c.per_question}
