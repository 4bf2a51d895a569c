"""Finds where two sequences that should be equal diverge, and why: a tie that rounding decides, or a bug."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float

from foretell.model.run.runner import Runner
from foretell.verify.logits import target_logits

Verdict = Literal["tie", "bug"]

WINDOW = 64
"""Tokens over which rounding noise is measured."""
_TOP_LOGITS = 8
"""Logits of a position that are compared: only the best ones can be chosen."""
_MAX_RELATIVE_NOISE: Mapping[str, float] = {
    "float32": 1e-4, "bfloat16": 0.05, "int8": 0.15, "int8-activations": 0.15, "int4": 0.15
}  # fmt: skip
"""Largest difference, as a share of the largest logit, that rounding in a precision explains. A larger one is a bug of
the target's forward pass.
"""


@dataclass(frozen=True)
class TokenDivergence:
    """The first token at which `actual` differs from `expected`. A token is None where its sequence has ended."""

    prompt: int
    """Index of the prompt, from 0."""
    position: int
    """Index of the token in the answer, from 0."""
    expected: int | None
    actual: int | None
    expected_text: str
    actual_text: str
    margin: float
    """Logit of the expected token minus logit of the actual one, when the target reads token by token."""
    noise: float
    """Largest difference between the logits of a token-by-token and a single-pass reading of the prefix: the rounding
    of this precision on this machine.
    """
    verdict: Verdict


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token in which two sequences differ; None if they are equal."""
    if list(expected) == list(actual):
        return None
    pairs = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


class DivergenceClassifier:
    """Classifies differences between greedy answers of one model."""

    def __init__(self, runner: Runner, precision: str, decode: Callable[[Sequence[int]], str]) -> None:
        self._runner, self._precision, self._decode = runner, precision, decode

    def classify(
        self, number: int, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]
    ) -> TokenDivergence | None:
        """The first difference between two greedy answers to prompt `number`; None if they are equal.

        A tie: the margin is at most twice the noise, so that either reading may rank either token first.
        """
        at = first_difference(expected, actual)
        if at is None:
            return None
        a = expected[at] if at < len(expected) else None
        b = actual[at] if at < len(actual) else None
        stepwise, single_pass = self.logits_both_ways([*prompt, *expected[:at]])
        noise = max_logit_difference(stepwise, single_pass)
        margin = float(stepwise[-1, a] - stepwise[-1, b]) if a is not None and b is not None else float("inf")
        is_rounding = noise <= _MAX_RELATIVE_NOISE[self._precision] * float(stepwise.abs().max())
        verdict: Verdict = "tie" if is_rounding and margin <= 2 * noise else "bug"
        return TokenDivergence(number, at, a, b, self._decode_one(a), self._decode_one(b), margin, noise, verdict)

    def logits_both_ways(self, tokens: Sequence[int]) -> tuple[Float[torch.Tensor, "t v"], Float[torch.Tensor, "t v"]]:
        """Logits after the last `WINDOW` tokens of a sequence, read token by token and in a single pass."""
        last = min(len(tokens), WINDOW)
        stepwise = target_logits(self._runner, tokens, last, single_pass=False)
        return stepwise, target_logits(self._runner, tokens, last, single_pass=True)

    def _decode_one(self, token: int | None) -> str:
        return "" if token is None else self._decode([token])


def max_logit_difference(a: Float[torch.Tensor, "t v"], b: Float[torch.Tensor, "t v"]) -> float:
    """Largest difference of two readings, among the best few tokens of each position."""
    best = a.topk(min(_TOP_LOGITS, a.shape[-1]), -1).indices
    return float((a.gather(-1, best) - b.gather(-1, best)).abs().max())


def mean_total_variation(a: Float[torch.Tensor, "t v"], b: Float[torch.Tensor, "t v"]) -> float:
    """Mean total variation between the distributions of two readings."""
    p, q = (torch.softmax(x.double(), -1) for x in (a, b))
    return float((p - q).abs().sum(-1).mean()) / 2
