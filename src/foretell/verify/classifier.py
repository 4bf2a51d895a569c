"""Where two texts that should be equal part, and why: a tie that rounding decides, or a bug."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float

from foretell.model.runner import Runner
from foretell.verify.logits import target_logits

Verdict = Literal["tie", "bug"]

WINDOW = 64
"""Tokens over which rounding noise is measured."""
_TOP_LOGITS = 8
_MAX_RELATIVE_NOISE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.15}
"""Most noise that a precision explains, as a share of the largest score; readings that differ more are themselves at
fault.
"""


@dataclass(frozen=True)
class TokenDivergence:
    """The first token at which `found` leaves `expected`. Tokens are None where a text had already ended."""

    prompt: int
    """Which prompt, counted from 0."""
    position: int
    """Which token of the answer, counted from 0."""
    expected: int | None
    found: int | None
    expected_text: str
    found_text: str
    margin: float
    """How much more the target scores the expected token, in logits, reading one token at a time."""
    noise: float
    """Largest difference between the scores of the two readings of the text up to here: the rounding of this precision
    on this machine.
    """
    verdict: Verdict


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ; None if they are equal."""
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))


class DivergenceClassifier:
    """Explains differences between greedy texts of one model."""

    def __init__(self, runner: Runner, precision: str, spell: Callable[[Sequence[int]], str]) -> None:
        self._runner, self._precision, self._spell = runner, precision, spell

    def classify(
        self, number: int, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
    ) -> TokenDivergence | None:
        """The first difference between two greedy answers to prompt `number`, judged; None if they are equal.

        A tie: the margin is no more than twice the noise, so either reading may put either token first.
        """
        at = first_difference(expected, found)
        if at is None:
            return None
        a = expected[at] if at < len(expected) else None
        b = found[at] if at < len(found) else None
        one_by_one, at_once = self.logits_both_ways([*prompt, *expected[:at]])
        noise = max_logit_difference(one_by_one, at_once)
        margin = float(one_by_one[-1, a] - one_by_one[-1, b]) if a is not None and b is not None else float("inf")
        credible = noise <= _MAX_RELATIVE_NOISE[self._precision] * float(one_by_one.abs().max())
        verdict: Verdict = "tie" if credible and margin <= 2 * noise else "bug"
        return TokenDivergence(number, at, a, b, self._word(a), self._word(b), margin, noise, verdict)

    def logits_both_ways(self, tokens: Sequence[int]) -> tuple[Float[torch.Tensor, "t v"], Float[torch.Tensor, "t v"]]:
        """Scores after the last tokens of a text, read one by one and all at once."""
        last = min(len(tokens), WINDOW)
        return target_logits(self._runner, tokens, last, single_pass=False), target_logits(
            self._runner, tokens, last, single_pass=True
        )

    def _word(self, token: int | None) -> str:
        return "" if token is None else self._spell([token])


def max_logit_difference(a: Float[torch.Tensor, "t v"], b: Float[torch.Tensor, "t v"]) -> float:
    """Largest difference of two readings among the scores that matter: the best few of each position."""
    best = a.topk(min(_TOP_LOGITS, a.shape[-1]), -1).indices
    return float((a.gather(-1, best) - b.gather(-1, best)).abs().max())


def mean_total_variation(a: Float[torch.Tensor, "t v"], b: Float[torch.Tensor, "t v"]) -> float:
    """Mean total variation between the distributions of two readings."""
    p, q = (torch.softmax(x.double(), -1) for x in (a, b))
    return float((p - q).abs().sum(-1).mean()) / 2
