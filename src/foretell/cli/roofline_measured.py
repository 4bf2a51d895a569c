"""Results of `foretell bench run` for `foretell roofline`: the acceptance of its methods."""

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
