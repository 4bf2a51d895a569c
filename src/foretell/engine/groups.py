"""The requests of a step by method: each method drafts for its own ones, and learns from its own part of the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from foretell.core.context import Context, StepResult
from foretell.core.draft_origins import draft_paths
from foretell.core.tree import TokenTree, concatenate_trees, join_probe_embeddings, merge_trees, root_tree
from foretell.draft.base import Continuation, NoDrafter, with_hidden_layers
from foretell.draft.prediction import Prediction
from foretell.engine.asking import Plan
from foretell.engine.budget import Budget
from foretell.engine.drafted_trees import DraftedTrees
from foretell.engine.method import AnyMethod, BoundMethod

T = TypeVar("T")
PREDICTION = "prediction"
"""Origin of the drafts of a predicted output."""
_MOST_PREDICTED = 16
"""Tokens of a predicted output that are drafted at most per step."""


class DraftError(Exception):
    """A method among several failed to draft; the cause says why."""

    def __init__(self, method: BoundMethod) -> None:
        super().__init__(f"{method.method.name} failed to draft")
        self.method = method


@dataclass
class MethodGroup:
    """The requests of a step that one method decodes."""

    bound: BoundMethod
    indices: list[int]
    """Their indices in the step."""
    drafts: bool = False
    """Whether it drafted in this step."""
    probe_offset: int = 0
    """What was added to the ids of its probe embeddings."""

    @property
    def method(self) -> AnyMethod:
        """The method."""
        return self.bound.method


class MethodGroups:
    """The groups of a step, from drafting to its result. `vocab`: of the target.

    `budget` decides which of the methods that it governs draft and which of their drafts are verified; others draft in
    full. `predictions`: the predicted outputs of the requests.
    """

    def __init__(
        self,
        methods: Sequence[BoundMethod],
        vocab: int,
        budget: Budget,
        predictions: Sequence[Prediction | None] = (),
    ) -> None:
        self._vocab, self._budget = vocab, budget
        self._methods, self._predictions = methods, predictions
        self._predicts = any(p is not None for p in predictions)
        if len(set(methods)) == 1:
            self.groups = [MethodGroup(methods[0], list(range(len(methods))))]
        else:
            indices = dict[BoundMethod, list[int]]()
            for i, method in enumerate(methods):
                indices.setdefault(method, []).append(i)
            self.groups = [MethodGroup(method, which) for method, which in indices.items()]
        self.hidden_layers = self.groups[0].method.draft.hidden_layers
        """Hidden layers that the drafters need; of a single one, in its order."""
        if len(self.groups) > 1:
            self.hidden_layers = tuple(sorted({layer for g in self.groups for layer in g.method.draft.hidden_layers}))

    def propose(self, context: Context, unread: Sequence[Sequence[int]], ready: Sequence[bool]) -> TokenTree:
        """The tree of each request below its unread tokens; only the requests that are `ready` to decode have drafts.

        Raises:
            DraftError: one of several methods failed. Exception: the only method failed.
        """
        parts = self._grow(context, ready)
        if self._predicts:
            for part in parts:
                self._add_predicted(part, context)
        self._budget.choose(parts)
        trees, offsets = join_probe_embeddings([self._add_probes(part, context) for part in parts], self._vocab)
        for part, offset in zip(parts, offsets, strict=True):
            for group in self.groups:
                if group.bound is part.bound:
                    group.probe_offset = offset
        order, reading = [i for part in parts for i in part.indices], [i for i, yes in enumerate(ready) if not yes]
        if reading:
            trees.append(root_tree([unread[i][-1] for i in reading]))
        tree = concatenate_trees(trees)
        return (tree.select(np.argsort(order + reading)) if len(trees) > 1 else tree).with_prefix(unread)

    def _grow(self, context: Context, ready: Sequence[bool]) -> list[DraftedTrees]:
        """The drafts of all requests that are `ready`: those of each method, and roots where none is asked."""
        asked = ((group, [i for i in group.indices if ready[i]]) for group in self.groups)
        return [self._part_of(group, which, context) for group, which in asked if which]

    def _part_of(self, group: MethodGroup, which: list[int], context: Context) -> DraftedTrees:
        if isinstance(group.method.draft, NoDrafter):
            return self._roots(group, which, context.select(which))
        if self._budget.governs(group.bound):
            return self._drafts(group, which, context)
        return self._in_full(group, which, context)

    def _roots(self, group: MethodGroup, indices: list[int], context: Context) -> DraftedTrees:
        """Roots, and the tokens that constraints force."""
        tree = group.method.fit(root_tree(context.last_tokens), context).limit_drafts(context.max_drafts)
        forced = tree.valid.astype(np.float64) if tree.nodes > 1 else None
        return DraftedTrees(None, indices, tree, self._budget.prunes(group.bound), forced)

    def _in_full(self, group: MethodGroup, indices: list[int], context: Context) -> DraftedTrees:
        """All that a method drafts by itself."""
        part, depths = context.select(indices), self._budget.depths(group.bound, indices)
        part = replace(part, max_depth=np.minimum(part.max_depth, depths))
        group.drafts = True
        return DraftedTrees(group.bound, indices, self._tried(group, partial(group.method.grow, part)))

    def _drafts(self, group: MethodGroup, indices: list[int], context: Context) -> DraftedTrees:
        """What the budget asks the drafters of a method for."""
        offers = list[tuple[list[int], TokenTree]]()
        for number in range(len(group.method.sources)):
            unread = partial(group.method.sources[number][0].unread, context)
            plan = self._budget.plan(group.bound, number, indices, unread)
            if plan is not None:
                offers += self._tried(group, partial(self._offer, group, number, plan, context))
        part = context.select(indices)
        if not offers:
            return self._roots(group, indices, part)
        group.drafts, tree, place = True, None, {i: n for n, i in enumerate(indices)}
        for which, offered in offers:
            whole = offered.spread(part.last_tokens, [place[i] for i in which])
            tree = whole if tree is None else merge_trees(whole, tree)
        assert tree is not None
        return DraftedTrees(group.bound, indices, group.method.finish(tree, part), removable=True)

    def _offer(
        self, group: MethodGroup, number: int, plan: Plan, context: Context
    ) -> list[tuple[list[int], TokenTree]]:
        """The trees of one drafter, and the requests that it drafts for."""
        source = drafter, _ = group.method.sources[number]
        most = drafter.max_depths(context.select(plan.asked)).tolist()
        pairs = zip(plan.asked, most, self._budget.depths(group.bound, plan.asked), strict=True)
        depths = {i: min(*depths, plan.deepest) for i, *depths in pairs if min(depths) > 0}
        if not depths:
            return []
        which, part = list(depths), context.select(list(depths))
        least = plan.least_score, plan.least_expanded
        tree = group.method.draft_from(source, part, list(depths.values()), least)
        if number and context.origins is not None:
            context.origins.record_tree(part.rows, tree, drafter.origin)
        return [(which, self._budget.offer(group.bound, number, which, tree))]

    def _tried(self, group: MethodGroup, call: Callable[[], T]) -> T:
        """The result of a drafter's call; of several methods, the one that failed is named."""
        try:
            return call()
        except Exception as error:
            if len(self.groups) == 1:
                raise
            raise DraftError(group.bound) from error

    def _add_predicted(self, part: DraftedTrees, context: Context) -> None:
        """Draft what follows in the predicted outputs of some requests."""
        predicted = [self._predict(i, part, context) for i in part.indices]
        for j, (i, continuation) in enumerate(zip(part.indices, predicted, strict=True)):
            if context.origins is not None and context.origins.asks(row := context.rows[i]):
                drafted = set(draft_paths(part.tree, j).values())
                paths = (continuation.tokens[:n] for n in range(1, len(continuation.tokens) + 1))
                for path in paths:
                    if path not in drafted:
                        context.origins.record(row, path, PREDICTION)
        part.add_predicted(predicted)

    def _predict(self, i: int, part: DraftedTrees, context: Context) -> Continuation:
        """What follows in the predicted output of request `i`, as far as its acceptor takes such drafts."""
        prediction, accept = self._predictions[i], self._methods[i].method.accept
        if prediction is None or not accept.lossless or not accept.takes_added:
            return Continuation((), ())
        most = min(_MOST_PREDICTED, int(context.max_depth[i]))
        if context.max_drafts and (limit := context.max_drafts[i]) is not None:
            drafted = part.tree.drafted_counts[part.indices.index(i)]
            most = min(most, limit - int(drafted))
        continuation = prediction.propose(most)
        rules = context.rules[i] if context.rules else None
        if rules is None:
            return continuation
        allowed = len(rules.allowed_prefix(context.sequences[i].generated, (), continuation.tokens))
        return Continuation(continuation.tokens[:allowed], continuation.cumulative_acceptance[:allowed])

    def _add_probes(self, part: DraftedTrees, context: Context) -> TokenTree:
        if part.bound is None:
            return part.tree
        group = next(group for group in self.groups if group.bound is part.bound)
        tree: TokenTree = self._tried(
            group, lambda: group.method.draft.add_probes(part.tree, context.select(part.indices))
        )
        return tree

    def asked(self, group: MethodGroup) -> tuple[bool, bool]:
        """Whether a method was asked for drafts, and whether the budget chose for whom; see `StepResult`."""
        governed = self._budget.governs(group.bound)
        return group.drafts or not governed, governed

    def result_of(self, group: MethodGroup, step: StepResult) -> StepResult:
        """A group's part of a step, with the hidden states that its drafter needs in the order in which it asked."""
        if len(self.groups) == 1:
            return step
        drafting, budgeted = self.asked(group)
        part = replace(step.select(group.indices), drafting=drafting, budgeted=budgeted)
        if group.probe_offset:
            part = replace(part, tree=part.tree.shift_probe_ids(self._vocab, -group.probe_offset))
        return with_hidden_layers(part, self.hidden_layers, group.method.draft.hidden_layers)
