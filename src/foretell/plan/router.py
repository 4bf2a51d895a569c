"""The routers of Skeleton-of-Thought (SoT-R): whether the answer to a question has independent points, by the model's
own judgement or by a trained function.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Self

from foretell.core.sampling import SamplingParams
from foretell.engine.request import Request, Update
from foretell.plan.base import PlanTask

_ASK = """\
Which form should the answer to the question have? A: a list of several independent points. B: a list of steps that \
depend on each other. C: no list.

Question: What are good gifts for a teacher?
Form: A

Question: What is 12 + 30?
Form: C

Question: How do I solve 3x = 9 step by step?
Form: B

Question: What are the benefits of reading?
Form: A

Question: Write a poem about snow.
Form: C

Question: Who painted the Mona Lisa?
Form: C

Question: {question}
Form:"""
_NO_QUESTION = "N/A"
_LETTERS = ("A", "B", "C")
_ALTERNATIVES = 64
"""Likeliest tokens that are looked through for the letters; a letter beyond them counts as the last of them."""


class Router:
    """Asks the model for a letter: A a list of independent points, B of dependent ones, C no list. A skeleton is for A.

    A small model says A to everything, so each letter's probability is divided by the one that it has where the
    question is missing (contextual calibration, Zhao et al., arXiv 2102.09690).
    """

    def __init__(self, task: PlanTask) -> None:
        self._task = task
        self._letters = [task.codec.encode(letter, add_special_tokens=False)[0] for letter in _LETTERS]
        self._scores: dict[int, list[float]] = {}

    def requests(self) -> list[Request]:
        """The question of the task, and none; one token each."""
        prompts = [self._task.ask(_ASK.format(question=q)) for q in (self._task.question, _NO_QUESTION)]
        shared = replace(
            self._task.request,
            sampling_params=SamplingParams(),
            max_new_tokens=1,
            stop=(),
            logprobs=_ALTERNATIVES,
            max_drafts=0,
        )
        return [replace(shared, prompt=prompt) for prompt in prompts]

    def observe(self, number: int, update: Update) -> bool:
        """Take the answer to request `number`; whether both are there."""
        if update.top_logprobs:
            known = dict(update.top_logprobs[0])
            least = min(known.values())
            self._scores[number] = [known.get(letter, least) for letter in self._letters]
        return len(self._scores) == 2

    @property
    def takes_skeleton(self) -> bool:
        """Whether the letter is A."""
        asked, prior = (self._scores[number] for number in sorted(self._scores))
        scores = [_finite(a) - _finite(b) for a, b in zip(asked, prior, strict=True)]
        return scores[0] >= max(scores)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -100.0


WEIGHTS = Path(__file__).with_name("router.json")
"""Weights of the trained router, which `tools/fit_router.py` writes."""
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_+")
_LONG = 30
"""Words of a question that brings a text along."""
_LEAST_KNOWN = 1 / 3
"""Share of a question's words that the trained router must know to judge it."""


def word_features(question: str) -> set[str]:
    """What the trained router sees of an English question: single words (numbers are all alike), pairs of them, and how
    it begins and ends.
    """
    words = _words(question)
    out = set(words) | {" ".join(pair) for pair in pairwise(words)}
    out |= {f"^ {' '.join(words[:n])}" for n in (1, 2, 3) if len(words) >= n}
    return out | {f"{words[-1]} $"} | ({"long"} if len(words) > _LONG else set()) if words else out


def _words(question: str) -> list[str]:
    return ["0" if w.isdigit() else w for w in _WORD.findall(question.lower())]


@dataclass(frozen=True)
class TrainedRouter:
    """A linear function of a question's words, in place of the paper's tuned RoBERTa: it takes no pass of the model.
    `weights` by feature; the `bias` is added to their sum.
    """

    weights: Mapping[str, float]
    bias: float

    @classmethod
    @cache
    def load(cls) -> Self:
        """The router that ships."""
        return cls(**json.loads(WEIGHTS.read_text("utf-8")))

    def takes_skeleton(self, question: str) -> bool | None:
        """Whether the answer has several independent points; None: the question is hardly English."""
        words = _words(question)
        if sum(w in self.weights for w in words) < _LEAST_KNOWN * len(words):
            return None
        return self.bias + sum(self.weights.get(f, 0.0) for f in word_features(question)) > 0
