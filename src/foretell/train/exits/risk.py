"""Thresholds with a bound on the expected loss (Learn then Test, arXiv 2110.01052; CALM, arXiv 2207.07061)."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_LARGEST_BET = 0.9
"""Largest bet, over the one that a loss of 1 would lose all with."""
_SMALLEST = 1e-4
"""Precision of `smallest_bound`."""


def betting_p_value(losses: Float[np.ndarray, " n"], bound: float) -> float:
    """p-value of "the expected loss is above `bound`" from independent losses in 0..1, valid for every number of them.

    The wealth of bets against it is a supermartingale under it, so 1 / wealth is a p-value (Ville's inequality;
    Waudby-Smith & Ramdas, arXiv 2010.09686). A bet depends on the losses before it alone. Small losses of small
    variance need far fewer answers than Hoeffding's inequality does.
    """
    if not 0 < bound < 1:
        return 0.0 if bound >= 1 else 1.0
    log_wealth, best, total, squares = 0.0, 0.0, 0.5, 0.25
    for i, loss in enumerate(losses.tolist(), 1):
        mean, variance = total / i, squares / i
        gain = bound - mean
        bet = min(max(gain / (variance + gain * gain), 0.0), _LARGEST_BET / (1 - bound))
        log_wealth += math.log1p(bet * (bound - loss))
        best = max(best, log_wealth)
        total += loss
        squares += (loss - total / (i + 1)) ** 2
    return math.exp(-best)


def count_accepted(losses: Sequence[Float[np.ndarray, " n"]], bound: float, confidence: float) -> int:
    """How many of the first settings, the most cautious first, keep the bound at this confidence: testing stops at the
    first that fails, so no correction for several tests is needed. `losses[i]`: of every answer under setting `i`.
    """
    for i, setting_losses in enumerate(losses):
        if betting_p_value(setting_losses, bound) > 1 - confidence:
            return i
    return len(losses)


def smallest_bound(losses: Float[np.ndarray, " n"], confidence: float) -> float:
    """The smallest bound that these losses keep at this confidence."""
    low, high = float(losses.mean()), 1.0
    while high - low > _SMALLEST:
        middle = (low + high) / 2
        if betting_p_value(losses, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high
