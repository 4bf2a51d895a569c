"""FREE's adaptive threshold of an exit (arXiv 2310.05424): a mixture of two Beta distributions."""

from dataclasses import dataclass, field
from math import lgamma
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float

from foretell.core.context import Context, StepResult, StepState, TokenBuffer

GRID = np.linspace(0.3, 0.9, 10)
"""Thresholds that are considered."""
MAX_UPDATES = 300
"""Requests after which the threshold stays."""
_MIN_VARIANCE = 1e-4


@dataclass
class BetaMixtureThreshold:
    """Chooses the threshold of an exit from how often it agreed with the whole model, by its confidence.

    The passes that compute the missing keys of tokens that left give the whole model's tokens too, so every token is
    labelled for nothing. The confidences of tokens that agree, and of those that do not, are each a Beta distribution
    by the method of moments: the labels are known, so the components need no iteration, as in the released code (the
    paper describes it as maximum likelihood). The threshold is the smallest of `GRID` from which on the first density's
    share of both is above `posterior`.

    `threshold`: before there are data.
    """

    threshold: float
    posterior: float = 0.4
    updates: int = 0
    _confidence: list[float] = field(default_factory=list)
    _agrees: list[bool] = field(default_factory=list)
    _new: bool = False

    def add(self, confidence: float, agrees: bool) -> None:
        """Record a token, whether it left or not."""
        if self.updates < MAX_UPDATES:
            self._confidence.append(confidence)
            self._agrees.append(agrees)
            self._new = True

    def update(self) -> float:
        """The threshold for the next request; it changes if there are new data, at most `MAX_UPDATES` times."""
        if self._new and self.updates < MAX_UPDATES:
            self.threshold = mixture_threshold(np.array(self._confidence), np.array(self._agrees), self.posterior)
            self.updates, self._new = self.updates + 1, False
        return self.threshold


def mixture_threshold(confidence: Float[np.ndarray, " n"], agrees: Bool[np.ndarray, " n"], posterior: float) -> float:
    """The smallest threshold of `GRID` from which on the density of confidences that agree is large enough."""
    if agrees.all() or not agrees.any():
        return float(GRID[0 if agrees.all() else -1])
    right, wrong = (_log_density(confidence[part]) for part in (agrees, ~agrees))
    share = 1 / (1 + np.exp(np.clip(wrong - right, -700, 700)))
    below = np.flatnonzero(share <= posterior)
    return float(GRID[min(int(below[-1]) + 1, len(GRID) - 1)] if len(below) else GRID[0])


def _log_density(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " g"]:
    """Logarithm of the density, at `GRID`, of the Beta distribution with the mean and variance of some values."""
    mean = float(np.clip(values.mean(), 1e-3, 1 - 1e-3))
    variance = float(np.clip(values.var(), _MIN_VARIANCE, 0.99 * mean * (1 - mean)))
    total = mean * (1 - mean) / variance - 1
    a, b = mean * total, (1 - mean) * total
    return (a - 1) * np.log(GRID) + (b - 1) * np.log1p(-GRID) - (lgamma(a) + lgamma(b) - lgamma(total))


class AdaptiveThresholds:
    """The threshold of every request, which is chosen at its first draft, and the tokens that it is learned from."""

    def __init__(self, mixture: BetaMixtureThreshold) -> None:
        self.mixture = mixture
        self._of_text = WeakKeyDictionary[TokenBuffer, float]()
        self._tested = StepState[dict[int, dict[int, tuple[float, int]]]]()
        """Per row and node of the step: how sure the exit is, and of which token."""

    def of(self, text: TokenBuffer) -> float:
        """The threshold of the request with this text."""
        if text not in self._of_text:
            self._of_text[text] = self.mixture.update()
        return self._of_text[text]

    def record(self, context: Context, row: int, node: int, confidence: float, token: int) -> None:
        """Note how sure the exit is after a node of the request of a row in this step, and of which token; `node`
        counts from the root.
        """
        noted = self._tested.of(context, {})
        noted.setdefault(row, {})[node] = confidence, token
        self._tested.put(context, noted)

    def observe(self, step: StepResult) -> None:
        """Compare what was noted with the whole model's most probable tokens."""
        output = step.output
        tested = self._tested.of(step.context, {})
        for i, row in enumerate(step.context.rows):
            for node, (confidence, token) in tested.get(row, {}).items():
                at = int(output.logit_index[i, step.tree.root(i) + node])
                if at >= 0:
                    own = output.logits[at].argmax() if output.argmax is None else output.argmax[at]
                    self.mixture.add(confidence, int(own) == token)
