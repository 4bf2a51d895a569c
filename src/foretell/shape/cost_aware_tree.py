"""EAGLE-2's dynamic tree with as many levels and nodes as pay on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from foretell.core.context import Context, StepResult
from foretell.core.engine_bound import EngineBound
from foretell.core.tree import TokenTree, root_tree
from foretell.draft.base import Predictor
from foretell.shape.base import Shape
from foretell.shape.dynamic_tree import DynamicTree
from foretell.shape.pass_cost import PassCost

_FIRST_MIN_SCORE = 0.07
"""Least score of a node before any time is known: where a further node costs some 3 % of a pass."""
_MIN_STEPS = 3
"""Steps that are timed before the times decide."""
_RATE_DECAY = 0.95
"""Share of the counted tokens and seconds kept per step."""
_LEVEL_SLOPE = 0.3
"""Time of a further level over that of the first one, before it is measured."""
_CHILD_SHARE = 0.8
"""Expected accepted tokens that a level adds, over the score of the best node that it expands."""
_MIN_EXPAND_SCORES = 0.03, 0.5
"""Bounds of the least score of a node that is expanded."""
_MIN_SCORE = 0.004
"""Least score of a node where nodes are free."""
_TRIALS = {15: 16, 31: 48, 63: 96, 127: 192}
"""Nodes of the trees by which the cost of larger passes is measured, and the pass from which on each is due."""
_TRIAL_STEPS = 8
"""Steps between two looks whether a trial is due."""
_TRIAL_INTERVAL = 1024
"""Passes between two trials of a size."""
_MAX_TRIAL_TOKENS = 1.0
"""A size is not tried where half of it costs the time of more tokens than this already: it cannot pay."""


@dataclass(frozen=True)
class _Plan:
    """The trees of a step."""

    rows: tuple[int, ...]
    levels: int
    """Levels of the deepest tree before nodes were left out."""


class CostAwareTree(EngineBound, Shape[Predictor]):
    """Of the dynamic trees of all requests (EAGLE-2, arXiv 2406.16858), the nodes that maximise expected tokens per
    second.

    A node is worth its score, the drafter's estimate of its acceptance, less the tokens that decoding gives in the time
    that the node costs; so is a level. The time of a pass by its size, of a level, and tokens per second are learned
    during the run. Now and then a larger tree is tried, so that nodes that cost nothing are found. `budget`: most nodes
    of a request. `cost`: seconds of a pass that something else learns; None: learned here.

    Since the choice depends on time, only acceptors whose output for a seed does not depend on the drafts (`Match`)
    keep answers reproducible.

    Raises:
        ValueError: a depth, width or budget below 1.
    """

    label = "dynamic tree sized by cost"

    drafter_type = Predictor

    def __init__(self, depth: int, width: int, budget: int, cost: PassCost | None = None) -> None:
        self._largest = DynamicTree(depth, width, budget, _FIRST_MIN_SCORE)
        self.cost = PassCost() if cost is None else cost
        self._own_cost, self._learns_own = self.cost, cost is None
        self._learns_cost = self._learns_own
        self._draft_cost = PassCost(slope=_LEVEL_SLOPE)
        """Seconds of drafting by the number of levels."""
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        self._plan: _Plan | None = None

    def share_cost(self, cost: PassCost | None) -> None:
        """Use the seconds of a pass that something else learns; None: learn them here."""
        if cost is None:
            self._learns_cost, self.cost = self._learns_own, self._own_cost
        else:
            self._learns_cost, self.cost = False, cost

    def expect_cost(self, table: Mapping[int, float]) -> None:
        """Begin with these seconds of a pass; see `PassCost.expect`."""
        self._own_cost.expect(table)

    def grow(self, draft: Predictor, context: Context) -> TokenTree:
        """The most profitable nodes of each request's dynamic tree."""
        rows, budget = context.pass_rows, self._largest.budget
        if self._steps < _MIN_STEPS:
            tree = self._largest.grow(draft, context)
            self._plan = _Plan(context.rows, _depth(tree))
            return tree
        if self._learns_cost and self._decodes(context) and self.cost.needs_measurement(rows):
            return root_tree(context.last_tokens)
        rate, trial = self._tokens / self._seconds, self._due_trial(context)
        pass_seconds = self.cost.seconds(rows, rows + len(context.rows) * budget)
        further = np.arange(1, len(pass_seconds))
        node_seconds = float(((pass_seconds[1:] - pass_seconds[0]) / further).min())
        least, most = _MIN_EXPAND_SCORES
        bounds = replace(
            self._largest,
            min_score=0.0 if trial else max(_MIN_SCORE, rate * node_seconds),
            min_expand_score=min(most, max(least, rate * self._level_seconds() / _CHILD_SHARE)),
        )
        tree = bounds.grow(draft, context)
        self._plan = _Plan(context.rows, _depth(tree))
        return _keep_best(tree, trial) if trial else self._most_profitable(tree, rate, pass_seconds)

    @staticmethod
    def _decodes(context: Context) -> bool:
        """Whether no prompt is read in this step."""
        return all(sequence.length > sequence.prompt_length for sequence in context.sequences)

    def _level_seconds(self) -> float:
        """Seconds of a further level."""
        seconds = self._draft_cost.seconds(1, max(2, self._largest.depth))
        return float(seconds[-1] - seconds[0]) / (len(seconds) - 1)

    def _due_trial(self, context: Context) -> int:
        """Nodes of all requests together that are tried in this step; 0: none."""
        rows = context.pass_rows
        if self._steps % _TRIAL_STEPS or not self._decodes(context):
            return 0
        for nodes, due in _TRIALS.items():
            plain, half = self.cost.seconds(rows, rows + nodes // 2)[[0, -1]].tolist()
            too_expensive = self._tokens * (half - plain) > _MAX_TRIAL_TOKENS * self._seconds
            if nodes > self._largest.budget * len(context.rows) or too_expensive:
                return 0
            if self.cost.needs_measurement(rows + nodes, _TRIAL_INTERVAL, due):
                return nodes
        return 0

    def _most_profitable(self, tree: TokenTree, rate: float, pass_seconds: Float[np.ndarray, " n"]) -> TokenTree:
        """The tree without the nodes that cost more than they promise."""
        if tree.score is None:
            return tree
        # Lists: on small trees, which are the common case, arrays take several times as long.
        scores = sorted((s for row in tree.score.tolist() for s in row[1:] if s > 0), reverse=True)
        tokens, best, most = 0.0, 0, -rate * float(pass_seconds[0])
        for count, (score, seconds) in enumerate(zip(scores, pass_seconds[1:].tolist(), strict=False), 1):
            tokens += score
            if tokens - rate * seconds > most:
                best, most = count, tokens - rate * seconds
        return _keep_best(tree, best)

    def observe(self, step: StepResult) -> None:
        """Learn the times of passes and levels and the tokens per second, unless the pass also read a prompt."""
        plan, self._plan, whole = self._plan, None, step.whole
        if not whole.tree.is_decode:
            return
        if self._learns_cost:
            self.cost.update(int(np.count_nonzero(whole.tree.active)), step.pass_seconds)
        if plan is not None and plan.levels and set(plan.rows) <= set(step.context.rows):
            self._draft_cost.update(plan.levels, step.draft_seconds)
            self._steps += 1
        self._tokens = _RATE_DECAY * self._tokens + sum(map(len, whole.new_tokens))
        self._seconds = _RATE_DECAY * self._seconds + max(whole.draft_seconds + step.pass_seconds, 1e-9)


def _depth(tree: TokenTree) -> int:
    """Levels below the roots."""
    deepest = 0
    for row in tree.parent.tolist():
        depth = [0] * len(row)
        for node, parent in enumerate(row):
            if parent >= 0:
                depth[node] = depth[parent] + 1
        deepest = max(deepest, *depth)
    return deepest


def _keep_best(tree: TokenTree, count: int) -> TokenTree:
    """The tree with the `count` drafted nodes of the highest scores, of all requests together."""
    if tree.score is None or np.count_nonzero(tree.valid) - tree.rows <= count:
        return tree
    score = np.where(tree.valid, tree.score, -1.0)
    score[:, 0] = 2.0
    # Stable: of equals the earlier ones stay, so that a node's parent is kept.
    order = np.argsort(-score, axis=None, kind="stable")[: tree.rows + count]
    kept = np.zeros(tree.valid.size, bool)
    kept[order] = True
    return replace(tree, valid=tree.valid & kept.reshape(tree.valid.shape))
