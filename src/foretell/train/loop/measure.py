"""Measurement of tokens per pass on held-out prompts: the metric of early stopping and of the best weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.model.run.runner import Runner
from foretell.plan import PlanEngine, PlanTask
from foretell.tokenizer.codec import Message
from foretell.train.data.batch_schedule import TokenizedDocument
from foretell.train.recipe.base import MeasuredPlan

_TEXT_PROMPT_TOKENS = 48
"""First tokens of a plain text that serve as its prompt."""
_MAX_PROMPT_TOKENS = 512
"""Longer prompts are used only where there are too few others."""


@dataclass(frozen=True)
class Measurement:
    """Result of greedy decoding of all prompts."""

    tokens_per_pass: float
    """All tokens divided by all passes of the target, its own token of every pass included."""
    accepted: tuple[float, ...]
    """Share of passes that accepted a draft token at depth 1, 2, …"""
    prompts: int
    new_tokens: int


def held_out_prompts(documents: Sequence[TokenizedDocument], count: int) -> list[list[int]]:
    """The prompts of the first `count` documents, short ones first; of plain text, its first tokens."""
    prompts = [d.tokens[: d.start or _TEXT_PROMPT_TOKENS].tolist() for d in documents]
    return sorted(prompts, key=lambda p: len(p) > _MAX_PROMPT_TOKENS)[:count]


def measure(
    runner: Runner,
    method: AnyMethod,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    eos: tuple[int, ...],
    measured_plan: MeasuredPlan | None = None,
) -> Measurement:
    """Decode all prompts as one batch. With a plan, a pass over all requests of an answer counts once for it."""
    requests = [Request(tuple(p), max_new_tokens=new_tokens, eos=eos) for p in prompts]
    if measured_plan is not None:
        return _measure_plan(Engine(runner, method, prefix_caching=True), requests, measured_plan)
    statistics = [c.statistics for c in Engine(runner, method, rows=len(prompts)).complete(requests)]
    passes, tokens = sum(s.target_passes for s in statistics), sum(s.new_tokens for s in statistics)
    depths = max((len(s.accepted_per_position) for s in statistics), default=0)
    accepted = [sum(sum(s.accepted_per_position[d : d + 1]) for s in statistics) / passes for d in range(depths)]
    return Measurement(tokens / passes, tuple(accepted), len(statistics), tokens)


def _measure_plan(engine: Engine, requests: Sequence[Request], measured: MeasuredPlan) -> Measurement:
    def encode(turns: Sequence[Message], continued: bool) -> list[int]:
        raise ValueError("the plan of a training asks nothing but the prompt")

    runs = [measured.plan.run(PlanTask("", r, measured.codec, encode, measured.context)) for r in requests]
    tokens = sum(c.statistics.new_tokens for c in PlanEngine(engine).complete(runs))
    return Measurement(tokens / sum(run.report.passes for run in runs), (), len(runs), tokens)
