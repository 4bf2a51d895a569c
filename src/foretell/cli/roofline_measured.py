"""Results of `foretell bench run` for `foretell roofline`: the acceptance of its methods."""

from pathlib import Path

from foretell.bench.output import read_results
from foretell.bench.results import is_peer
from foretell.bench.schema import BenchResults
from foretell.roofline.measured import MeasuredMethod
from foretell.roofline.method_profiles import profile_of_method

FORMATS = {"float32": "32", "bfloat16": "16", "int8": "8", "int8-activations": "8", "int4": "4g32"}
"""Number formats of the weights by dtype of a run."""


def read_measured(path: Path) -> tuple[BenchResults, list[MeasuredMethod]]:
    """Results and their methods of the catalogue, in order; one method may come with several number formats.

    Raises:
        ValueError: no results, or none of a drafting method.
    """
    results = read_results(path)
    found = list[MeasuredMethod]()
    for competitor in results.competitors:
        variant, _, dtype = competitor.name.partition("/")
        method = variant.partition("@")[0]
        pooled = competitor.pooled
        if is_peer(competitor.name) or method not in profile_of_method() or pooled.tokens_per_pass is None:
            continue
        source = f"{path}, {pooled.questions} questions, {results.created[:10]}"
        drafted, cumulative = pooled.drafted_per_pass or 0.0, pooled.acceptance_cumulative
        found.append(
            MeasuredMethod(
                method, FORMATS.get(dtype, "16"), pooled.tokens_per_pass, drafted, cumulative, pooled.speedup, source
            )
        )
    if not found:
        raise ValueError(f"{path} has no results of a drafting method; run `foretell bench run --method NAME`")
    return results, found
