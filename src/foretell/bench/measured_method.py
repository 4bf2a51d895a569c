"""What a run has measured of a method's acceptance, as the roofline reads it."""

from foretell.bench.schema import Metrics
from foretell.roofline.measured import MeasuredMethod, MeasuredPasses

_FORMATS = {"float32": "32", "bfloat16": "16", "int8": "8", "int8-activations": "8", "int4": "4g32"}
"""Number formats of the weights by dtype of a run."""


def measured_method(
    variant: str, dtype: str, model: str, pooled: Metrics, plain: Metrics, source: str
) -> MeasuredMethod | None:
    """The acceptance of a method `NAME` or `NAME@N` in a run; None: its passes were not counted. `plain`: of plain
    decoding with the same weights.
    """
    if pooled.tokens_per_pass is None:
        return None
    name, form = variant.partition("@")[0], _FORMATS.get(dtype, "16")
    return MeasuredMethod(
        name, form, pooled.tokens_per_pass, pooled.drafted_per_pass or 0.0, pooled.acceptance_cumulative,
        pooled.speedup, source, variant, f"{model} {dtype}", _passes(pooled, plain),
    )  # fmt: skip


def _passes(pooled: Metrics, plain: Metrics) -> MeasuredPasses | None:
    """What the passes of a method did; None: the results do not say."""
    tokens, read = pooled.decode_tokens_per_pass, pooled.read_per_pass
    if not tokens or not read:
        return None
    return MeasuredPasses(
        pooled.requests_per_pass, read, pooled.drafted_per_pass or 0.0, tokens, pooled.mean_context,
        plain.requests_per_pass,
    )  # fmt: skip
