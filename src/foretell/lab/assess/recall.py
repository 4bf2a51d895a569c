"""Recall: what a model finds again in a text of invented facts, by the place of the fact."""

import random
from collections.abc import Mapping

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


def recall(model: Model, texts: int, facts: int, seed: int = 0) -> Mapping[str, float]:
    """Share of facts found again among four names, by the place of the fact in its text.

    A text has `facts` sentences, which say who is the mayor of an invented town; the question about one of them comes
    after the text. The model reads the text as a prompt and the question token by token, as it would decode it, so that
    a policy that evicts keys of the KV cache has its effect.

    Raises:
        ValueError: too few or too many facts, or a text that is longer than the model's context.
    """
    if not MIN_FACTS <= facts <= MAX_FACTS:
        raise ValueError(f"a text for recall has {MIN_FACTS} to {MAX_FACTS} facts, found {facts}")
    runner = model.runner()
    return {
        place: float(np.mean([_finds(model, runner, facts, at, f"{seed} {i}") for i in range(texts)]))
        for place, at in zip(PLACES, (0, facts // 2, facts - 1), strict=True)
    }


def _finds(model: Model, runner: Runner, facts: int, at: int, seed: str) -> bool:
    """Whether the mayor of fact `at` gets the highest probability of four mayors of the text."""
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
    start = min(len(model.codec.encode(text)), len(choice.prompt) - 1)
    runner.truncate(0, 0)
    for begin in range(0, start, _CHUNK):
        read_chunk(runner, choice.prompt[begin : min(begin + _CHUNK, start)], 1)
    for token in choice.prompt[start:-1]:
        read_chunk(runner, [token], 1)
    return int(score_unread(runner, [Choice(choice.prompt[-1:], choice.candidates)])[0].argmax()) == 0
