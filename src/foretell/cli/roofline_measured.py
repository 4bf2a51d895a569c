"""Results of `foretell bench run` for `foretell roofline`: the acceptance of its methods."""

from pathlib import Path

from foretell.bench.output import read_results
from foretell.bench.results import is_peer
from foretell.bench.schema import BenchResults, Metrics
from foretell.roofline.measured import PLAIN, MeasuredMethod, MeasuredPasses
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
    plain = {c.name: c.pooled for c in results.competitors}
    for competitor in results.competitors:
        variant, _, dtype = competitor.name.partition("/")
        method = variant.partition("@")[0]
        pooled = competitor.pooled
        if is_peer(competitor.name) or method not in profile_of_method() or pooled.tokens_per_pass is None:
            continue
        source = f"{path}, {pooled.questions} questions, {results.created[:10]}"
        drafted, cumulative = pooled.drafted_per_pass or 0.0, pooled.acceptance_cumulative
        model, base = f"{results.settings.model} {dtype}", plain.get(f"{PLAIN}/{dtype}", pooled)
        form = FORMATS.get(dtype, "16")
        found.append(
            MeasuredMethod(
                method, form, pooled.tokens_per_pass, drafted, cumulative, pooled.speedup, source,
                variant, model, _passes(pooled, base),
            )
        )  # fmt: skip
    if not found:
        raise ValueError(f"{path} has no results of a drafting method; run `foretell bench run --method NAME`")
    return results, found


def _passes(pooled: Metrics, plain: Metrics) -> MeasuredPasses | None:
    """What the passes of a method did; None: the results do not say."""
    tokens, read = pooled.decode_tokens_per_pass, pooled.read_per_pass
    if not tokens or not read:
        return None
    return MeasuredPasses(
        pooled.requests_per_pass, read, pooled.drafted_per_pass or 0.0, tokens, pooled.mean_context,
        plain.requests_per_pass,
    )  # fmt: skip
