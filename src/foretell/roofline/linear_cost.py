"""How much of something one operation needs, as a sum over the few quantities a pass is made of.

Every cost of a transformer (OPs, bytes, elements alive) is linear in six extents, so an operation is six numbers per
cost. That one table serves a single setting, a sweep of ten thousand (the extents are arrays) and the web page (the
numbers are embedded in it).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = float | Array


@dataclass(frozen=True)
class Extents:
    """The sizes of one pass as one layer sees them; scalars or arrays of one shape.

    rows: new tokens. pairs: (query, key) pairs attended. span: cached or new positions whose keys and values are read.
    touched: experts that at least one row visits. outputs: rows that need logits.
    """

    rows: Number
    pairs: Number
    span: Number
    touched: Number
    outputs: Number


@dataclass(frozen=True)
class Amount:
    """A linear form over the extents: one + rows·N + pairs·... ; elements or OPs."""

    one: float = 0.0
    rows: float = 0.0
    pairs: float = 0.0
    span: float = 0.0
    touched: float = 0.0
    outputs: float = 0.0

    @property
    def values(self) -> tuple[float, ...]:
        """The six coefficients."""
        return self.one, self.rows, self.pairs, self.span, self.touched, self.outputs

    def at(self, e: Extents) -> Number:
        """Value of the form at given extents."""
        total: Number = self.one
        for coefficient, extent in (
            (self.rows, e.rows),
            (self.pairs, e.pairs),
            (self.span, e.span),
            (self.touched, e.touched),
            (self.outputs, e.outputs),
        ):
            if coefficient:
                total = total + coefficient * extent
        return total

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*(x + y for x, y in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> "Amount":
        """The form scaled by a number."""
        return Amount(*(x * factor for x in self.values))


NOTHING = Amount()


def pairs_attended(tokens: Number, past: Number, window: int, square: bool) -> Number:
    """(query, key) pairs of one sequence: `tokens` new rows after `past` cached ones, each seeing itself and what came
    before.

    A token tree has at most as many pairs as a chain of the same size, whose count this is. `square`: every row sees
    every new row, which is what a kernel without causal skipping computes and what the paper counts.
    """
    if square:
        return tokens * span_read(tokens, past, window)
    if not window:
        return tokens * past + tokens * (tokens + 1) / 2
    short = np.clip(window - np.asarray(past, dtype=np.float64), 0, tokens)
    return short * past + short * (short + 1) / 2 + (tokens - short) * window


def span_read(tokens: Number, past: Number, window: int) -> Number:
    """Positions whose keys and values one sequence reads in a pass; with a window, those that any new row can still
    see.
    """
    total = past + tokens
    return np.minimum(np.asarray(total, dtype=np.float64), window + tokens - 1) if window else total


def distinct_experts(count: float, active: float, rows: Number) -> Number:
    """Expected number of experts that `rows` tokens touch under uniform independent routing: E·(1 - (1 - k/E)^N).

    An upper guess: real routing is skewed and neighbouring tokens share experts. With count 1 and active = density it
    is the share of neurons that a batch under contextual sparsity touches.
    """
    if count <= 0:
        return 0.0
    return count * (1.0 - (1.0 - active / count) ** np.asarray(rows, dtype=np.float64))
