"""What a run advises, in one sentence."""

from foretell.bench.competitor import PLAIN
from foretell.bench.schema import BenchResults, CompetitorResult

_LEAST_GAIN = 1.05
"""Speed-up below which a method is not worth its choice: repeated runs differ by as much."""


def verdict(results: BenchResults) -> str:
    """The fastest lossless method with its speed-up over plain decoding of the same precision, or that none pays."""
    own = [c for c in results.competitors if not c.peer]
    methods = [c for c in own if c.lossless and c.category_means.speedup and c.name.partition("/")[0] != PLAIN]
    if not methods:
        return "No lossless method was measured beside plain decoding."
    best = max(methods, key=lambda c: (c.category_means.tokens_per_second, c.category_means.speedup or 0.0))
    name, _, precision = best.name.partition("/")
    if len(results.settings.dtypes) > 1:
        name += f" in {precision}"
    gain = f"{best.category_means.speedup:.1f} times plain decoding{_spread(best)}"
    if (best.category_means.speedup or 0.0) < _LEAST_GAIN:
        return f"On this machine use plain decoding: the fastest method, {name}, has {gain}."
    return f"On this machine use {name}: {gain}{_identity(best)}."


def _spread(best: CompetitorResult) -> str:
    speedups = [m.speedup for m in best.categories.values() if m.speedup is not None]
    return f" ({min(speedups):.1f} to {max(speedups):.1f} by category)" if len(speedups) > 1 else ""


def _identity(best: CompetitorResult) -> str:
    if not best.compared:
        return ""
    if best.identical == best.compared:
        return "; the answers are identical"
    return f"; {best.identical} of {best.compared} answers are identical, and the report has where the others differ"
