"""How likely the drafts of a drafter are accepted, and how many it offers, learned from what the target chose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from foretell.core.tree import TokenTree
from foretell.engine.tuning import KEPT_DRAFTS, MEMORY, PRIOR_PROMISE, PRIOR_SURVIVAL, PRIOR_WEIGHT, ROOM

RUNGS = 32
"""Kinds of drafts. Of those with a score, rung 0 holds the most confident ones; of others, rung `k` those at depth
`k + 1`, and the last one all deeper ones.
"""
_REFRESH = 8
"""Counted requests after which the chances follow the counts."""
_FEW = 0.01
"""Drafts per step below which a rung is not worth a look."""
_SCORED = ((1 - (np.arange(RUNGS) + 0.5) / RUNGS) ** 2).tolist()
_BY_DEPTH = (PRIOR_SURVIVAL ** np.arange(1.0, RUNGS + 1)).tolist()


def rungs_of(tree: TokenTree) -> list[list[int]]:
    """The rung of every node."""
    if tree.score is None:
        return [[min(max(depth - 1, 0), RUNGS - 1) for depth in row] for row in tree.depth.tolist()]
    # Lists: on small trees arrays take several times as long.
    return [[min(int(RUNGS - RUNGS * sqrt(score)), RUNGS - 1) for score in row] for row in tree.score.tolist()]


class Acceptance:
    """Chances of one drafter's drafts by rung, for one kind of sampling; `scored`: whether they have scores."""

    def __init__(self, scored: bool) -> None:
        self.scored = scored
        self.chance: list[float] = list(_SCORED if scored else _BY_DEPTH)
        """Probability that a draft is accepted; falls from rung to rung."""
        self._right, self._seen = [PRIOR_WEIGHT * p for p in self.chance], [PRIOR_WEIGHT] * RUNGS
        self._nodes, self._counted = [0.0] * RUNGS, 0
        self.steps = 0.0
        """Steps of requests that were counted; older ones fade."""
        tokens, nodes = PRIOR_PROMISE
        self.promise = [(tokens / nodes, nodes)]
        """Drafts that a request's step is expected to offer: their chances, falling, and their numbers."""
        self.promised = tokens
        """How many of these are accepted."""

    def count(self, rungs: Sequence[int], right: Sequence[int], room: int) -> None:
        """Count the drafts of a request's step whose fate is known, and those of them that the target chose; `room`:
        how deep they might be.
        """
        for rung in rungs:
            self._seen[rung] += 1
        for rung in right:
            self._right[rung] += 1
        if room >= ROOM:
            self.steps = min(self.steps + 1, MEMORY)
        self._counted += 1
        if self._counted % _REFRESH == 0 or self._counted < _REFRESH:
            self._refresh()

    def count_offer(self, rungs: Sequence[int], room: int) -> None:
        """Count all drafts of a request's step."""
        if room >= ROOM:
            share = max(1 / (self.steps + 1), 1 / MEMORY**0.5)
            self._nodes = [n - share * n for n in self._nodes]
            for rung in rungs:
                self._nodes[rung] += share

    def _refresh(self) -> None:
        for rung, seen in enumerate(self._seen):
            if seen > MEMORY:
                self._seen[rung], self._right[rung] = MEMORY, self._right[rung] * MEMORY / seen
        rate = np.array(self._right) / np.array(self._seen)
        # The mean of the two nearest monotone sequences.
        falling, rising = np.minimum.accumulate(rate), np.maximum.accumulate(rate[::-1])[::-1]
        self.chance = ((falling + rising) / 2).tolist()
        if self.steps:
            promise = [(c, n) for c, n in zip(self.chance, self._nodes, strict=True) if n > _FEW]
            # Never nothing: what it offers for a single request is told as a multiple of it.
            self.promise = promise or [(self.chance[0], _FEW)]
            self.promised = sum(chance * n for chance, n in self.promise)

    def state(self) -> dict[str, Any]:
        """What `from_state` reads."""
        by_rung = {"right": self._right, "seen": self._seen, "offered": self._nodes}
        rounded = {name: [round(count, 3) for count in counts] for name, counts in by_rung.items()}
        return {"steps": round(self.steps), **rounded}

    @staticmethod
    def from_state(scored: bool, state: Mapping[str, Any]) -> "Acceptance":
        """What earlier processes have counted; it weighs less than they knew, as their texts were others.

        Raises:
            ValueError, TypeError, KeyError: something else.
        """
        acceptance = Acceptance(scored)
        right, seen, offered = ([float(n) for n in state[name]] for name in ("right", "seen", "offered"))
        are_counts = all(0 <= r <= n and n > 0 and o >= 0 for r, n, o in zip(right, seen, offered, strict=True))
        if len(seen) != RUNGS or not are_counts:
            raise ValueError("counts that are none")
        weights = [min(1.0, KEPT_DRAFTS / n) for n in seen]
        acceptance._right = [w * r for w, r in zip(weights, right, strict=True)]
        acceptance._seen = [w * n for w, n in zip(weights, seen, strict=True)]
        acceptance._nodes, acceptance.steps = offered, min(float(state["steps"]), KEPT_DRAFTS)
        acceptance._refresh()
        return acceptance

    @property
    def hope(self) -> float:
        """How many times the promise the truth may be."""
        return 1 + 1 / sqrt(1 + self.steps)

    def least_score(self, floor: float) -> float:
        """The least score of drafts with at least this chance."""
        if not self.scored:
            return 0.0
        good = sum(chance >= floor for chance in self.chance)
        return (1 - good / RUNGS) ** 2


@dataclass
class OfferedTree:
    """The tree that a drafter offers to some requests of a step, as far as it is needed to learn from it."""

    tokens: list[list[int]]
    parents: list[list[int]]
    valid: list[list[bool]]
    rungs: list[list[int]]
    levels: list[int]
    """Of each tree, below its root."""

    @staticmethod
    def of(tree: TokenTree) -> "OfferedTree":
        """Of a tree with a prefix of 1."""
        levels = [max(depths) for depths in np.where(tree.valid, tree.depth, 0).tolist()]
        return OfferedTree(tree.token.tolist(), tree.parent.tolist(), tree.valid.tolist(), rungs_of(tree), levels)

    @property
    def deepest(self) -> int:
        """Levels of the deepest tree."""
        return max(self.levels)

    def drafted(self, row: int) -> list[int]:
        """The rungs of all drafts of a row."""
        pairs = zip(self.rungs[row][1:], self.valid[row][1:], strict=True)
        return [rung for rung, yes in pairs if yes]

    def judge(self, row: int, new: Sequence[int]) -> tuple[list[int], list[int]]:
        """The rungs of the drafts of a row whose fate the new tokens of its request tell, and of those that are right.

        The target's text does not depend on what was drafted, so this holds for drafts that were left out, too.
        """
        tokens, valid, rungs, known = self.tokens[row], self.valid[row], self.rungs[row], len(new)
        depth, is_right = [0] * len(tokens), [True] * len(tokens)
        judged, right = list[int](), list[int]()
        for node, parent in enumerate(self.parents[row]):
            if not node or not valid[node]:
                continue
            level = depth[node] = depth[parent] + 1
            if not is_right[parent]:
                is_right[node] = False
            elif level > known:
                continue
            else:
                is_right[node] = tokens[node] == new[level - 1]
                if is_right[node]:
                    right.append(rungs[node])
            judged.append(rungs[node])
        return judged, right
