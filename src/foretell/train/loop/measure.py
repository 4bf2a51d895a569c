"""What training is stopped by and judged on: tokens per pass of the target on prompts that were held back."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.engine.engine import Engine, Request
from foretell.engine.method import AnyMethod
from foretell.model.runner import Runner
from foretell.train.data.batch_schedule import TokenizedDocument

_TEXT_PROMPT_TOKENS = 48
"""Tokens of a plain text that serve as its prompt."""
_MAX_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Measurement:
    """Greedy decoding of all prompts."""

    tokens_per_pass: float
    """All tokens over all passes, the target's own token of every pass included."""
    accepted: tuple[float, ...]
    """Share of passes that accepted a draft at depth 1, 2, …"""
    prompts: int
    new_tokens: int


def held_out_prompts(texts: Sequence[TokenizedDocument], count: int) -> list[list[int]]:
    """The prompts of as many texts, the first that are short enough to be read quickly; of plain text, how it
    begins.
    """
    prompts = [t.tokens[: t.start or _TEXT_PROMPT_TOKENS].tolist() for t in texts]
    return sorted(prompts, key=lambda p: len(p) > _MAX_PROMPT_TOKENS)[:count]


def measure(
    runner: Runner, method: AnyMethod, prompts: Sequence[Sequence[int]], new_tokens: int, eos: tuple[int, ...]
) -> Measurement:
    """Decode all prompts together and count."""
    engine = Engine(runner, method, rows=len(prompts))
    requests = [Request(tuple(p), max_new_tokens=new_tokens, eos=eos) for p in prompts]
    found = [c.statistics for c in engine.complete(requests)]
    passes, tokens = (sum(s.target_passes for s in found), sum(s.new_tokens for s in found))
    depths = max((len(s.accepted_per_position) for s in found), default=0)
    accepted = [sum(sum(s.accepted_per_position[d : d + 1]) for s in found) / passes for d in range(depths)]
    return Measurement(tokens / passes, tuple(accepted), len(found), tokens)
