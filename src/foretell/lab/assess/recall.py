"""Recall: what a model finds again in a text of invented facts, by the place of the fact."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foretell.api import Model
from foretell.lab.assess.choices import Choice, score_unread
from foretell.model.run.runner import Runner
from foretell.verify.logits import read_chunk

_FIRST = ("Bal", "Dor", "Fen", "Gar", "Hul", "Kim", "Lor", "Mar", "Nol", "Per", "Sav", "Tor")
_LAST = ("an", "bek", "den", "ik", "mund", "os", "rin", "ta", "vel", "wyn")
_NAMES = tuple(first + last for first in _FIRST for last in _LAST)
PLACES = ("beginning", "middle", "end")
MIN_FACTS, MAX_FACTS = 4, len(_NAMES) // 2
_CHUNK = 256
"""Tokens of a pass over a text."""


def recall(
    model: Model, texts: int, facts: int, seed: int = 0, on_read: Callable[[int], None] = lambda tokens: None
) -> Mapping[str, float]:
    """Share of facts found again among four names, by the place of the fact in its text.

    A text has `facts` sentences, which say who is the mayor of an invented town; the question about one of them comes
    after the text. The model reads the text as a prompt and the question token by token, as it would decode it, so that
    a policy that evicts keys of the KV cache has its effect. `on_read` is called with the tokens of every text.

    Raises:
        ValueError: too few or too many facts, or a text that is longer than the model's context.
    """
    runner, right = model.runner(), {place: list[bool]() for place in PLACES}
    for place, question in questions(model, texts, facts, seed):
        right[place].append(_finds(runner, question))
        on_read(len(question.choice.prompt))
    return {place: float(np.mean(hits)) for place, hits in right.items()}


@dataclass(frozen=True)
class Question:
    """A text of facts with a question; `start`: tokens of the text, which are read as a prompt."""

    choice: Choice
    start: int


def check_facts(facts: int) -> None:
    """Refuse a number of facts of which no text is made.

    Raises:
        ValueError: too few or too many.
    """
    if not MIN_FACTS <= facts <= MAX_FACTS:
        raise ValueError(f"a text for recall has {MIN_FACTS} to {MAX_FACTS} facts, found {facts}")


def questions(model: Model, texts: int, facts: int, seed: int = 0) -> list[tuple[str, Question]]:
    """All questions with the place of the fact that is asked about.

    Raises:
        ValueError: too few or too many facts, or a text that is longer than the model's context.
    """
    check_facts(facts)
    places = zip(PLACES, (0, facts // 2, facts - 1), strict=True)
    return [(place, _question(model, facts, at, f"{seed} {i}")) for place, at in places for i in range(texts)]


def _question(model: Model, facts: int, at: int, seed: str) -> Question:
    """The question who is the mayor of fact `at`, with four mayors of the text."""
    source = random.Random(seed)
    names = source.sample(_NAMES, 2 * facts)
    towns, mayors = names[:facts], names[facts:]
    text = " ".join(f"The mayor of {t} is called {m}." for t, m in zip(towns, mayors, strict=True))
    wrong = source.sample([m for m in mayors if m != mayors[at]], 3)
    choice = Choice.of(model.codec, f"{text} Again, the mayor of {towns[at]} is called", [mayors[at], *wrong])
    if len(choice.prompt) + len(wrong) * 8 > model.config.context:
        raise ValueError(
            f"a text for recall with {facts} facts has {len(choice.prompt)} tokens, and the model reads "
            f"{model.config.context}; ask for fewer facts"
        )
    return Question(choice, min(len(model.codec.encode(text)), len(choice.prompt) - 1))


def _finds(runner: Runner, question: Question) -> bool:
    """Whether the right candidate gets the highest probability."""
    choice, start = question.choice, question.start
    runner.truncate(0, 0)
    for begin in range(0, start, _CHUNK):
        read_chunk(runner, choice.prompt[begin : min(begin + _CHUNK, start)], 1)
    for token in choice.prompt[start:-1]:
        read_chunk(runner, [token], 1)
    return int(score_unread(runner, [Choice(choice.prompt[-1:], choice.candidates)])[0].argmax()) == 0
