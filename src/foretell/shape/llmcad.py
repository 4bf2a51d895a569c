"""A tree that follows the drafter's confidence from branch to branch until none is worth more: LLMCad's token tree."""

import math
from dataclasses import dataclass

import numpy as np

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import Exclusive
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft.base import Predictor
from foretell.shape.base import Shape, TreeBuilder


@dataclass
class GrowingBranch:
    """A path under growth: its last node, how many nodes it added itself, its depth, and the log of its cumulative
    confidence.
    """

    leaf: int = 0
    size: int = 0
    depth: int = 0
    confidence: float = 0.0


class LLMCadTree(Exclusive, Shape[Predictor]):
    """The branch furthest below its fair share of tokens grows next; verification starts when the best branch is too
    unsure (arXiv 2309.04255).

    A branch's share of the tokens made so far is its part of the summed cumulative confidences. One step appends the
    drafter's best token and opens a branch for every other token above `fork`. A tree ends at `budget` nodes, or when
    the best cumulative confidence falls below a threshold that each text adapts: it starts at `threshold`, is
    multiplied by `decay` after a round without a mistake, and divided by `decay` to the power of the share of mistaken
    tokens after any other. Grows node by node, so drafting is as sequential as in a chain.
    """

    label = "tree paced by confidence"

    needs = Predictor

    def __init__(self, budget: int = 16, fork: float = 0.3, threshold: float = 0.01, decay: float = 0.5) -> None:
        if budget < 1 or not 0 <= fork <= 1 or not 0 < threshold <= 1 or not 0 < decay < 1:
            raise ValueError(
                "a paced tree needs a budget of at least 1, a fork level in 0..1, a threshold in (0, 1] and a decay in "
                "(0, 1), "
                f"found {budget}, {fork}, {threshold}, {decay}"
            )
        self.budget, self.fork, self.threshold, self.decay = budget, fork, threshold, decay
        self._log_threshold: dict[int, float] = {}
        self._grown: set[int] = set()

    def threshold_of(self, row: int) -> float:
        """The present threshold of a text, in (0, 1]."""
        return math.exp(self._log(row))

    def _log(self, row: int) -> float:
        return self._log_threshold.get(row, math.log(self.threshold))

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A tree per text."""
        self._grown = set(context.rows)
        growth = TreeBuilder(context)
        groves = [[GrowingBranch()] for _ in context.rows]
        while True:
            places = zip(groves, context.max_depth.tolist(), context.rows, strict=True)
            turns = [self._next(grove, max_depth, row) for grove, max_depth, row in places]
            if not any(turns):
                return growth.build()
            idle = growth.tree.nodes - 1
            growth.frontier = np.array([[idle if branch is None else branch.leaf] for branch in turns])
            distributions = growth.expand(draft)
            found = [self._candidates(distributions, i, turns[i], groves[i]) for i in range(len(turns))]
            self._append(growth, turns, groves, found)

    def _next(self, grove: list[GrowingBranch], max_depth: int, row: int) -> GrowingBranch | None:
        """The branch to lengthen; None when the tree is to be verified."""
        nodes = sum(b.size for b in grove)
        open_ends = [b for b in grove if b.depth < max_depth]
        if nodes >= self.budget or not open_ends or max(b.confidence for b in grove) < self._log(row):
            return None
        return max(open_ends, key=lambda b: fair_share(b, grove) - b.size)

    def _candidates(
        self, distributions: ProcessedDistributions, i: int, branch: GrowingBranch | None, grove: list[GrowingBranch]
    ) -> list[tuple[int, float]]:
        """Best token after the branch and every other one above the fork level, with their log-confidences."""
        if branch is None:
            return []
        left = self.budget - sum(b.size for b in grove)
        confidence = distributions.confidence(i, branch.leaf)
        most = 1 + (int(1 / self.fork) if self.fork else left)
        best = confidence.topk(min(most, left, len(confidence)))
        pairs = list(zip(best.indices.tolist(), best.values.double().tolist(), strict=True))
        return [(t, math.log(max(p, 1e-300))) for k, (t, p) in enumerate(pairs) if k == 0 or p > self.fork]

    def _append(
        self,
        growth: TreeBuilder,
        turns: list[GrowingBranch | None],
        groves: list[list[GrowingBranch]],
        found: list[list[tuple[int, float]]],
    ) -> None:
        """Add the candidates of every text, and the branches they lengthen or open."""
        width, first = max(map(len, found)), growth.tree.nodes
        parent = np.repeat(growth.frontier, width, axis=1)
        token, live = np.zeros_like(parent), np.zeros(parent.shape, bool)
        for i, (branch, grove, candidates) in enumerate(zip(turns, groves, found, strict=True)):
            if branch is None:
                continue
            token[i, : len(candidates)], live[i, : len(candidates)] = [t for t, _ in candidates], True
            base, depth = branch.confidence, branch.depth + 1
            for k, (_, sure) in enumerate(candidates[1:], 1):
                grove.append(GrowingBranch(first + k, 1, depth, base + sure))
            branch.leaf, branch.size, branch.depth = first, branch.size + 1, depth
            branch.confidence = base + candidates[0][1]
        growth.add(parent, token, live)

    def observe(self, step: StepResult) -> None:
        """Lower the threshold after a round without a mistake, raise it after any other."""
        for i, row in enumerate(step.context.rows):
            accepted = len(step.paths[i]) - int(step.tree.prefix_length[i])
            if row in self._grown and step.tree.valid[i, int(step.tree.prefix_length[i]) :].any():
                offered = accepted + _height(step.tree, i, step.paths[i][-1])
                mistaken = (offered - accepted) / offered
                change = -mistaken if mistaken else 1.0
                self._log_threshold[row] = min(0.0, self._log(row) + change * math.log(self.decay))
        self._grown = set()

    def release(self, row: int) -> None:
        """Forget a row."""
        self._log_threshold.pop(row, None)


def fair_share(branch: GrowingBranch, grove: list[GrowingBranch]) -> float:
    """Tokens that the branch would have if all made so far were dealt by cumulative confidence."""
    best = max(b.confidence for b in grove)
    weights = [math.exp(b.confidence - best) for b in grove]
    return sum(b.size for b in grove) * math.exp(branch.confidence - best) / sum(weights)


def _height(tree: TokenTree, row: int, node: int) -> int:
    """Levels of live nodes below `node`."""
    children = tree.children(row)
    level, height = children.get(node, []), 0
    while level:
        height += 1
        level = [c for n in level for c in children.get(n, [])]
    return height
