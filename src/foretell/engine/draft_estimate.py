"""What drafting with a method gives and takes, from counts and times of earlier steps."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from foretell.core.tree import TokenTree
from foretell.shape.pass_cost import PassCost

_SCORES = np.array([0.97, 0.93, 0.88, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01])
"""Least scores of the kinds of scored nodes; the last kind has lower ones."""
_CENTERS = (np.append(1.0, _SCORES) + np.append(_SCORES, 0.0)) / 2
_KINDS = len(_CENTERS)
"""Kinds of nodes; of nodes without a score, kind `k` holds those of depth `k + 1`, the last kind all deeper ones."""
_PRIOR_SURVIVAL = 0.7
"""Prior probability that a node without a score is accepted if its parent is."""
_PRIOR_WEIGHT = 8.0
"""Weight of the prior chances, in nodes."""
_MEMORY = 256.0
"""Nodes of a kind after which older ones begin to fade."""
_COUNT_SHARE = 0.1
"""Weight of the newest step in the mean number of nodes."""
_ROW_SLOPE = 0.1
"""Time of drafting for a further request over that for the first one, before it is measured."""
_MIN_TIMINGS = 3
"""Timed steps before the times decide."""


class _KindCounts:
    """Chances of acceptance and numbers of nodes by kind, the likeliest kind first."""

    def __init__(self, prior: Float[np.ndarray, " k"]) -> None:
        self._rate, self._weight = prior.copy(), np.full(_KINDS, _PRIOR_WEIGHT)
        self.chance: Float[np.ndarray, " k"] = prior.copy()
        """Probability that a node of a kind is accepted; falls from kind to kind."""
        self.nodes: Float[np.ndarray, " k"] = np.zeros(_KINDS)
        """Mean number of drafted nodes per request and step."""
        self._steps = 0

    def count_drafted(self, kind: Int[np.ndarray, " m"], rows: int, known: int) -> None:
        """Count the nodes that were drafted for `rows` requests; kinds from `known` on may have been cut off."""
        drafted = np.bincount(kind, minlength=_KINDS) / rows
        share = _COUNT_SHARE if self._steps else 1.0
        self.nodes[:known] += (drafted - self.nodes)[:known] * share
        self._steps += 1

    def count_verified(self, verified: Int[np.ndarray, " m"], accepted: Int[np.ndarray, " a"]) -> None:
        """Count nodes by their kinds."""
        count = np.bincount(verified, minlength=_KINDS)
        right = np.bincount(accepted, minlength=_KINDS)
        self._weight = np.maximum(np.minimum(self._weight + count, _MEMORY), count)
        self._rate += (right - count * self._rate) / self._weight
        # The mean of the two nearest monotone sequences.
        falling = np.minimum.accumulate(self._rate)
        self.chance = (falling + np.maximum.accumulate(self._rate[::-1])[::-1]) / 2


class DraftEstimate:
    """Expected acceptance, nodes and drafting time of one method."""

    def __init__(self) -> None:
        self._counts = {
            True: _KindCounts(_CENTERS),
            False: _KindCounts(_PRIOR_SURVIVAL ** np.arange(1.0, _KINDS + 1)),
        }
        """By whether the nodes have scores: the trees of some methods have them in some steps."""
        self.scored = False
        """Whether the last trees had scores."""
        self._cost = PassCost(slope=_ROW_SLOPE)
        """Seconds of drafting by the number of requests; per level, where levels are counted."""
        self._timings = 0

    @property
    def known(self) -> bool:
        """Whether enough was measured."""
        return self._timings >= _MIN_TIMINGS

    @property
    def chance(self) -> Float[np.ndarray, " k"]:
        """Probability of acceptance by kind of node, the likeliest first; without scores, by depth."""
        return self._counts[self.scored].chance

    @property
    def nodes(self) -> Float[np.ndarray, " k"]:
        """Mean number of nodes that are drafted per request, by kind."""
        return self._counts[self.scored].nodes

    def chances(self, tree: TokenTree) -> Float[np.ndarray, "b n"]:
        """Probability of acceptance of every node; it does not rise along a path."""
        if tree.score is not None:
            return np.interp(tree.score, _CENTERS[::-1], self._counts[True].chance[::-1])
        return np.asarray(self._counts[False].chance[_kinds(tree)])

    def seconds(self, rows: int) -> float:
        """Expected seconds of drafting for so many requests; per level, where levels are counted."""
        return self._cost.seconds_of([rows])[0]

    def count_time(self, rows: int, seconds: float, levels: int) -> None:
        """Count the time of drafting `levels` levels for so many requests."""
        if seconds > 0 and levels > 0:
            self._cost.update(rows, seconds / levels)
            self._timings += 1

    def count_nodes(
        self,
        tree: TokenTree,
        verified: Bool[np.ndarray, "b n"],
        accepted: Sequence[tuple[int, int]],
        depths: Sequence[int],
    ) -> None:
        """Count a drafted tree: those of its nodes that the target verified, and those that were accepted, as pairs of
        row and node. `depths`: how deep the drafts of each request might be.
        """
        self.scored = tree.score is not None
        counts, kinds, drafted = self._counts[self.scored], _kinds(tree), tree.valid.copy()
        drafted[:, 0] = False
        counts.count_drafted(kinds[drafted], tree.rows, _KINDS if self.scored else min(_KINDS, *depths))
        right = [kinds[row, node] for row, node in accepted]
        counts.count_verified(kinds[verified & drafted], np.array(right, np.int64))


def _kinds(tree: TokenTree) -> Int[np.ndarray, "b n"]:
    """The kind of every node."""
    if tree.score is not None:
        return np.asarray(np.searchsorted(-_SCORES, -tree.score))
    return np.clip(tree.depth - 1, 0, _KINDS - 1)
