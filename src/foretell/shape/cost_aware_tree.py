"""EAGLE-2's dynamic tree with as many levels and nodes as pay on this machine."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from foretell.core.context import Context, StepResult, StepState
from foretell.core.engine_bound import EngineBound
from foretell.core.tree import TokenTree, root_tree, tree_from_lists
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


_Draft = tuple[float, int, int]
"""Score, request and node of a draft."""


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
        self._levels = StepState[int]()
        """Levels of the deepest tree of a step before nodes were left out."""

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
            self._levels.put(context, _depth(tree))
            return tree
        if self._learns_cost and self._decodes(context) and self.cost.needs_measurement(rows):
            return root_tree(context.last_tokens)
        rate, trial = self._tokens / self._seconds, self._due_trial(context)
        node_seconds = self.cost.least_increase(rows, rows + len(context.rows) * budget)
        least, most = _MIN_EXPAND_SCORES
        bounds = (
            0.0 if trial else max(_MIN_SCORE, rate * node_seconds),
            min(most, max(least, rate * self._level_seconds() / _CHILD_SHARE)),
        )
        tree = self._largest.grow_within(draft, context, bounds)
        self._levels.put(context, _depth(tree))
        drafts = _ranked_drafts(tree)
        return _keep_best(tree, drafts, trial or self._profitable_count(drafts, rate, rows))

    @staticmethod
    def _decodes(context: Context) -> bool:
        """Whether no prompt is read in this step."""
        return all(sequence.length > sequence.prompt_length for sequence in context.sequences)

    def _level_seconds(self) -> float:
        """Seconds of a further level."""
        levels = max(2, self._largest.depth)
        first, last = self._draft_cost.seconds_of((1, levels))
        return (last - first) / (levels - 1)

    def _due_trial(self, context: Context) -> int:
        """Nodes of all requests together that are tried in this step; 0: none."""
        rows = context.pass_rows
        if self._steps % _TRIAL_STEPS or not self._decodes(context):
            return 0
        for nodes, due in _TRIALS.items():
            plain, half = self.cost.seconds_of((rows, rows + nodes // 2))
            too_expensive = self._tokens * (half - plain) > _MAX_TRIAL_TOKENS * self._seconds
            if nodes > self._largest.budget * len(context.rows) or too_expensive:
                return 0
            if self.cost.needs_measurement(rows + nodes, _TRIAL_INTERVAL, due):
                return nodes
        return 0

    def _profitable_count(self, drafts: Sequence[_Draft], rate: float, rows: int) -> int:
        """How many of the best drafts promise more than they cost."""
        plain, *further = self.cost.seconds_of(range(rows, rows + len(drafts) + 1))
        tokens, best, most = 0.0, 0, -rate * plain
        for count, ((score, _, _), seconds) in enumerate(zip(drafts, further, strict=True), 1):
            tokens += score
            if tokens - rate * seconds > most:
                best, most = count, tokens - rate * seconds
        return best

    def observe(self, step: StepResult) -> None:
        """Learn the times of passes and levels and the tokens per second, unless the pass also read a prompt."""
        levels, whole = self._levels.of(step.context, 0), step.whole
        if not whole.tree.is_decode:
            return
        if self._learns_cost:
            self.cost.update(whole.tree.active_count, step.pass_seconds)
        if levels:
            self._draft_cost.update(levels, step.draft_seconds)
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


def _ranked_drafts(tree: TokenTree) -> list[_Draft]:
    """The drafted nodes of all requests, those of the highest scores first; of equals the earlier ones, so that a
    node's parent comes before it.
    """
    # Lists: on small trees, which are the common case, arrays take several times as long.
    if tree.score is None:
        return []
    pairs = zip(tree.score.tolist(), tree.valid.tolist(), strict=True)
    drafts = [(s, i, j) for i, (row, valid) in enumerate(pairs) for j, s in enumerate(row) if j and valid[j]]
    return sorted(drafts, key=itemgetter(0), reverse=True)


def _keep_best(tree: TokenTree, drafts: Sequence[_Draft], count: int) -> TokenTree:
    """The tree with the first `count` of its ranked drafts."""
    if tree.score is None or len(drafts) <= count:
        return tree
    kept = [[0] for _ in range(tree.rows)]
    for _, row, node in sorted(drafts[:count], key=itemgetter(2)):
        kept[row].append(node)
    tokens, parents, scores = [], [], []
    for row, nodes in enumerate(kept):
        token, parent, score = tree.token[row].tolist(), tree.parent[row].tolist(), tree.score[row].tolist()
        place = {node: i for i, node in enumerate(nodes)}
        tokens.append([token[node] for node in nodes])
        parents.append([-1, *(place[parent[node]] for node in nodes[1:])])
        scores.append([score[node] for node in nodes])
    return tree_from_lists(tokens, parents, scores)
