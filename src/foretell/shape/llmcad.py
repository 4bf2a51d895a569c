"""LLMCad's token tree: the drafter's confidence decides which branch grows next and when the tree is verified."""

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from foretell.core.context import Context, StepResult, StepState, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft.base import Predictor
from foretell.shape.base import Shape, TreeBuilder

_MIN_PROBABILITY = 1e-300
"""Lower bound of probabilities before their logarithm is taken."""


@dataclass
class GrowingBranch:
    """A path of the tree that can still grow."""

    leaf: int = 0
    """Its last node."""
    size: int = 0
    """Nodes that the branch added itself."""
    depth: int = 0
    log_confidence: float = 0.0
    """Summed log-probabilities of its tokens under the drafter."""


class LLMCadTree(Shape[Predictor]):
    """The branch furthest below its share of tokens grows next; the tree is verified when the best branch is too
    unlikely (arXiv 2309.04255).

    A branch's share of the tokens drafted so far is its part of the summed cumulative confidences. One step appends the
    drafter's most probable token and opens a branch for every other token above `branch_threshold`. A tree ends at
    `budget` nodes, or when the best cumulative confidence falls below a threshold that adapts per request: it starts at
    `threshold`, is multiplied by `decay` after a step without a rejected token, and divided by `decay` to the power of
    the share of rejected tokens otherwise. The tree grows node by node, so drafting is as sequential as for a chain.

    Raises:
        ValueError: a parameter out of range.
    """

    label = "tree paced by confidence"

    drafter_type = Predictor

    def __init__(
        self, budget: int = 16, branch_threshold: float = 0.3, threshold: float = 0.01, decay: float = 0.5
    ) -> None:
        if budget < 1 or not 0 <= branch_threshold <= 1 or not 0 < threshold <= 1 or not 0 < decay < 1:
            raise ValueError(
                "an LLMCad tree needs a budget of at least 1, a branch threshold in 0..1, a threshold in (0, 1] and a "
                f"decay in (0, 1), found {budget}, {branch_threshold}, {threshold}, {decay}"
            )
        self.budget, self.branch_threshold, self.threshold, self.decay = budget, branch_threshold, threshold, decay
        self._log_threshold = WeakKeyDictionary[TokenBuffer, float]()
        """By sequence: a request that is paused or preempted goes on with its own."""
        self._drafted_rows = StepState[tuple[int, ...]]()

    def _log_threshold_for(self, text: TokenBuffer) -> float:
        return self._log_threshold.get(text, math.log(self.threshold))

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """A tree for each request."""
        self._drafted_rows.put(context, context.rows)
        builder = TreeBuilder(context)
        branches_per_row = [[GrowingBranch()] for _ in context.rows]
        while True:
            parts = zip(branches_per_row, context.max_depth.tolist(), context.sequences, strict=True)
            selected = [self._select_branch(branches, max_depth, text) for branches, max_depth, text in parts]
            if not any(selected):
                return builder.build()
            unused = builder.tree.nodes - 1
            builder.frontier = np.array([[unused if branch is None else branch.leaf] for branch in selected])
            distributions = builder.expand(draft)
            candidates = [
                self._candidates(distributions, i, branch, branches_per_row[i]) for i, branch in enumerate(selected)
            ]
            self._add_nodes(builder, selected, branches_per_row, candidates)

    def _select_branch(self, branches: list[GrowingBranch], max_depth: int, text: TokenBuffer) -> GrowingBranch | None:
        """The branch that grows next; None when the tree is to be verified."""
        nodes = sum(b.size for b in branches)
        expandable = [b for b in branches if b.depth < max_depth]
        best = max(b.log_confidence for b in branches)
        if nodes >= self.budget or not expandable or best < self._log_threshold_for(text):
            return None
        return max(expandable, key=lambda b: token_share(b, branches) - b.size)

    def _candidates(
        self, distributions: ProcessedDistributions, i: int, branch: GrowingBranch | None, branches: list[GrowingBranch]
    ) -> list[tuple[int, float]]:
        """The most probable token after the branch and every other one above the branch threshold, with their
        log-probabilities.
        """
        if branch is None:
            return []
        left = self.budget - sum(b.size for b in branches)
        confidence = distributions.confidence(i, branch.leaf)
        count = 1 + (int(1 / self.branch_threshold) if self.branch_threshold else left)
        best = confidence.topk(min(count, left, len(confidence)))
        pairs = list(zip(best.indices.tolist(), best.values.double().tolist(), strict=True))
        return [
            (t, math.log(max(p, _MIN_PROBABILITY)))
            for k, (t, p) in enumerate(pairs)
            if k == 0 or p > self.branch_threshold
        ]

    def _add_nodes(
        self,
        builder: TreeBuilder,
        selected: list[GrowingBranch | None],
        branches_per_row: list[list[GrowingBranch]],
        candidates_per_row: list[list[tuple[int, float]]],
    ) -> None:
        """Add the candidates of every request: the first one lengthens its branch, each further one opens a branch."""
        width, first = max(map(len, candidates_per_row)), builder.tree.nodes
        parent = np.repeat(builder.frontier, width, axis=1)
        token, valid = np.zeros_like(parent), np.zeros(parent.shape, bool)
        for i, (branch, branches, candidates) in enumerate(
            zip(selected, branches_per_row, candidates_per_row, strict=True)
        ):
            if branch is None:
                continue
            token[i, : len(candidates)], valid[i, : len(candidates)] = [t for t, _ in candidates], True
            base, depth = branch.log_confidence, branch.depth + 1
            for k, (_, log_probability) in enumerate(candidates[1:], 1):
                branches.append(GrowingBranch(first + k, 1, depth, base + log_probability))
            branch.leaf, branch.size, branch.depth = first, branch.size + 1, depth
            branch.log_confidence = base + candidates[0][1]
        builder.add(parent, token, valid)

    def observe(self, step: StepResult) -> None:
        """Lower the threshold of a row after a step without a rejected token, raise it after any other."""
        rows = self._drafted_rows.of(step.context, ())
        for i, (row, text) in enumerate(zip(step.context.rows, step.context.sequences, strict=True)):
            if row in rows and step.num_drafted(i):
                accepted = step.num_accepted(i)
                reachable = accepted + _subtree_height(step.tree, i, step.paths[i][-1])
                rejected_share = (reachable - accepted) / reachable
                exponent = -rejected_share if rejected_share else 1.0
                log_threshold = self._log_threshold_for(text) + exponent * math.log(self.decay)
                self._log_threshold[text] = min(0.0, log_threshold)


def token_share(branch: GrowingBranch, branches: list[GrowingBranch]) -> float:
    """Tokens that the branch would have if those drafted so far were divided by cumulative confidence."""
    best = max(b.log_confidence for b in branches)
    weights = [math.exp(b.log_confidence - best) for b in branches]
    return sum(b.size for b in branches) * math.exp(branch.log_confidence - best) / sum(weights)


def _subtree_height(tree: TokenTree, row: int, node: int) -> int:
    """Levels of valid nodes below `node`."""
    children = tree.children(row)
    level, height = children.get(node, []), 0
    while level:
        height += 1
        level = [c for n in level for c in children.get(n, [])]
    return height
