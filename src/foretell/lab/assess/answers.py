"""Free-running answers: where the greedy texts of two models part, and how they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from foretell.api import Model
from foretell.bench.questions import BUILT_IN, load_questions
from foretell.core.sampling import SamplingParams
from foretell.engine.request import Completion
from foretell.verify.classifier import first_difference

_GRAM = 4


@dataclass(frozen=True)
class AnswerAssessment:
    """Greedy answers of a model; the last three beside those of another model."""

    answers: int
    repeated: float
    """Share of the sequences of 4 tokens that an answer holds a second time."""
    ended: float
    """Share of answers that end before the limit."""
    equal: float | None = None
    """Share of answers that are equal token for token."""
    kept_tokens: float | None = None
    """Share of the other model's tokens that come before the first difference."""
    median_difference: float | None = None
    """Median place of the first token that differs, of the answers that differ."""


def assess_answers(
    model: Model,
    against: Model | None,
    answers: int,
    max_new_tokens: int,
    on_read: Callable[[int], None] = lambda tokens: None,
) -> AnswerAssessment:
    """Answer the first of the built-in questions with both models; `on_read` is called with new tokens."""
    prompts = [q.turns[0] for q in load_questions(BUILT_IN).questions[:answers]]
    mine = _complete(model, prompts, max_new_tokens, on_read)
    texts = [c.tokens for c in mine]
    repeated = sum(map(repeated_share, texts)) / len(texts)
    ended = sum(c.finish_reason != "length" for c in mine) / len(mine)
    if against is None:
        return AnswerAssessment(len(mine), repeated, ended)
    theirs = [c.tokens for c in _complete(against, prompts, max_new_tokens, on_read)]
    return AnswerAssessment(len(mine), repeated, ended, *agreement(theirs, texts))


def agreement(expected: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> tuple[float, float, float | None]:
    """Share of equal answers, share of the expected tokens before the first difference, and its median place."""
    places = [first_difference(a, b) for a, b in zip(expected, answers, strict=True)]
    kept = sum(len(a) if at is None else at for a, at in zip(expected, places, strict=True))
    different = [at for at in places if at is not None]
    total = sum(map(len, expected))
    return (
        1 - len(different) / len(places),
        kept / total if total else 1.0,
        float(median(different)) if different else None,
    )


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of the sequences of 4 tokens that occurred before in the same answer."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _complete(
    model: Model, prompts: Sequence[str], max_new_tokens: int, on_read: Callable[[int], None]
) -> list[Completion]:
    sampling = SamplingParams(temperature=0.0)
    requests = [model.request(p, sampling, max_new_tokens=max_new_tokens) for p in prompts]
    return model.engine().complete(requests, lambda update: on_read(len(update.tokens)))
