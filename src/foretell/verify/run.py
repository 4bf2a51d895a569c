"""Requests through the engine, for the checks."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.engine import Engine, Request
from foretell.engine.method import AnyMethod
from foretell.engine.statistics import RequestStatistics
from foretell.model.runner import Runner


@dataclass(frozen=True)
class Result:
    """What a request got and cost."""

    tokens: tuple[int, ...]
    statistics: RequestStatistics


def run(runner: Runner, method: AnyMethod, requests: Sequence[Request], rows: int) -> list[Result]:
    """All requests with one method, at most `rows` together; results in their order."""
    completions = Engine(runner, method, rows=rows).complete(requests)
    return [Result(c.tokens, c.statistics) for c in completions]


def tokens_per_pass(results: Sequence[Result]) -> float:
    """Mean over all passes."""
    passes = sum(r.statistics.target_passes for r in results)
    return sum(r.statistics.new_tokens for r in results) / passes if passes else 0.0


def drafted(results: Sequence[Result]) -> tuple[int, int]:
    """Tokens drafted, and accepted."""
    return sum(r.statistics.drafted for r in results), sum(sum(r.statistics.accepted_per_position) for r in results)
