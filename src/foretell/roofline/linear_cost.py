"""Costs of one operation as linear functions of the sizes of a forward pass.

Every cost of a transformer operation (OPs, elements moved, elements stored) is linear in six sizes and a constant, so
seven coefficients describe it. The same coefficients serve a single workload and a sweep (the sizes are arrays).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = float | Array


@dataclass(frozen=True)
class Extents:
    """Sizes of one pass as one layer sees them; scalars or arrays of one shape.

    rows: new tokens of all sequences. pairs: (query, key) pairs attended. kv_positions: cached or new positions whose
    keys and values are read. active_experts: experts that at least one row is routed to. logit_rows: rows that need
    logits. sequences: those with new tokens, whose recurrent states are read.
    """

    rows: Number
    pairs: Number
    kv_positions: Number
    active_experts: Number
    logit_rows: Number
    sequences: Number


@dataclass(frozen=True)
class LinearCost:
    """Coefficients of a cost that is linear in the extents; the cost is in OPs or in elements."""

    constant: float = 0.0
    rows: float = 0.0
    pairs: float = 0.0
    kv_positions: float = 0.0
    active_experts: float = 0.0
    logit_rows: float = 0.0
    sequences: float = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The seven coefficients, the constant first."""
        return (
            self.constant, self.rows, self.pairs, self.kv_positions, self.active_experts, self.logit_rows,
            self.sequences,
        )  # fmt: skip

    def evaluate(self, extents: Extents) -> Number:
        """The cost at given extents."""
        total: Number = self.constant
        for coefficient, extent in (
            (self.rows, extents.rows),
            (self.pairs, extents.pairs),
            (self.kv_positions, extents.kv_positions),
            (self.active_experts, extents.active_experts),
            (self.logit_rows, extents.logit_rows),
            (self.sequences, extents.sequences),
        ):
            if coefficient:
                total = total + coefficient * extent
        return total

    def __add__(self, other: "LinearCost") -> "LinearCost":
        return LinearCost(*(x + y for x, y in zip(self.coefficients, other.coefficients, strict=True)))

    def scaled(self, factor: float) -> "LinearCost":
        """The cost multiplied by a number."""
        return LinearCost(*(x * factor for x in self.coefficients))


ZERO = LinearCost()


def attention_pairs(tokens: Number, cached: Number, window: int, square: bool) -> Number:
    """(query, key) pairs of one sequence: `tokens` new rows after `cached` positions, under a causal mask.

    The count is that of a chain; a token tree of the same size has at most as many. `window`: sliding window in tokens,
    0 for none. `square`: count every pair of new rows, as kernels without causal skipping and the paper do.
    """
    if square:
        return tokens * kv_positions_read(tokens, cached, window)
    if not window:
        return tokens * cached + tokens * (tokens + 1) / 2
    short = np.clip(window - np.asarray(cached, dtype=np.float64), 0, tokens)
    return short * cached + short * (short + 1) / 2 + (tokens - short) * window


def kv_positions_read(tokens: Number, cached: Number, window: int) -> Number:
    """Positions whose keys and values one sequence reads in a pass; with a window, those in the window of any new
    row.
    """
    total = cached + tokens
    return np.minimum(np.asarray(total, dtype=np.float64), window + tokens - 1) if window else total


SHARED_ROUTING = 0.15
"""Part of a token's routing that it shares with the token before it. In Mixtral 22 to 28 % of consecutive tokens have
the same first expert in the middle and last layers, where independent routing gives 12.5 % (arXiv 2401.04088, table 5).
"""


def independent_rows(tokens: Number) -> Number:
    """Tokens that route independently, among `tokens` consecutive ones of one sequence."""
    return 1.0 + (tokens - 1.0) * (1 - SHARED_ROUTING)


def expected_active_experts(count: float, per_token: float, rows: Number) -> Number:
    """Expected number of experts that `rows` tokens activate under uniform independent routing: E·(1 - (1 - k/E)^N).

    An overestimate: real routing is skewed. With count 1 and `per_token` a
    density, it is the share of neurons that a batch activates under contextual sparsity.
    """
    if count <= 0:
        return 0.0
    return count * (1.0 - (1.0 - per_token / count) ** np.asarray(rows, dtype=np.float64))
