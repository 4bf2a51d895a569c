"""The prompting router of Skeleton-of-Thought (SoT-R): the model says whether a question has independent points."""

import math
from dataclasses import replace

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
