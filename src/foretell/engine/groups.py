"""The requests of a step by method: each method drafts for its own ones, and learns from its own part of the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.core.context import Context, StepResult
from foretell.core.draft_origins import draft_paths
from foretell.core.tree import TokenTree, concatenate_trees, join_probe_embeddings, root_tree
from foretell.draft.base import Continuation, with_hidden_layers
from foretell.draft.prediction import Prediction
from foretell.engine.controller import Controller
from foretell.engine.drafted_trees import NO_LIMIT, DraftedTrees
from foretell.engine.method import AnyMethod, BoundMethod

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
    draft_seconds: float = 0.0
    """Time that it took to draft."""
    probe_offset: int = 0
    """What was added to the ids of its probe embeddings."""

    @property
    def method(self) -> AnyMethod:
        """The method."""
        return self.bound.method


class MethodGroups:
    """The groups of a step, from drafting to its result. `vocab`: of the target; `clock` gives seconds.

    `controller` decides which methods draft and which drafts are verified; None: all. `predictions`: the predicted
    outputs of the requests. `paused`: a method that does not draft in this step.
    """

    def __init__(
        self,
        methods: Sequence[BoundMethod],
        vocab: int,
        clock: Callable[[], float],
        controller: Controller | None = None,
        predictions: Sequence[Prediction | None] = (),
        paused: BoundMethod | None = None,
    ) -> None:
        self._vocab, self._clock, self._controller = vocab, clock, controller
        self._methods, self._predictions, self._paused = methods, predictions, paused
        self._predicts = any(p is not None for p in predictions)
        if len(set(methods)) == 1:
            self.groups = [MethodGroup(methods[0], list(range(len(methods))))]
        else:
            indices = dict[BoundMethod, list[int]]()
            for i, method in enumerate(methods):
                indices.setdefault(method, []).append(i)
            self.groups = [MethodGroup(method, which) for method, which in indices.items()]
        self.hidden_layers = self.groups[0].method.hidden_layers
        """Hidden layers that the drafters need; of a single one, in its order."""
        if len(self.groups) > 1:
            self.hidden_layers = tuple(sorted({layer for g in self.groups for layer in g.method.hidden_layers}))

    def propose(self, context: Context, unread: Sequence[Sequence[int]], ready: Sequence[bool]) -> TokenTree:
        """The tree of each request below its unread tokens; only the requests that are `ready` to decode have drafts.

        Raises:
            DraftError: one of several methods failed. Exception: the only method failed.
        """
        plain = self._paused is not None and all(group.bound is self._paused for group in self.groups)
        if not self._predicts and all(ready):
            if plain and not context.rules:
                return root_tree(context.last_tokens).with_prefix(unread)
            if not plain and len(self.groups) == 1 and self._controller is None:
                return self.groups[0].method.propose(context).with_prefix(unread)
        parts = self._grow(context, ready)
        if self._predicts:
            for part in parts:
                self._add_predicted(part, context)
        if self._controller is not None:
            self._controller.prune(parts)
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
        count, parts = sum(ready), list[DraftedTrees]()
        for group in self.groups:
            which = [i for i in group.indices if ready[i]]
            if not which:
                continue
            depths = [NO_LIMIT] * len(which)
            if group.bound is self._paused:
                depths = [0] * len(which)
            elif self._controller is not None:
                depths = self._controller.depths(group.bound, len(which))
            asked = {i: depth for i, depth in zip(which, depths, strict=True) if depth}
            roots = [i for i in which if i not in asked]
            if roots:
                parts.append(self._roots(group, roots, context.select(roots)))
            if asked:
                part = context.select(list(asked))
                depths = list(asked.values())
                limited = replace(part, max_depth=np.minimum(part.max_depth, depths), other_rows=count - len(asked))
                parts.append(self._draft(group, list(asked), depths, limited))
        return parts

    def _roots(self, group: MethodGroup, indices: list[int], context: Context) -> DraftedTrees:
        """Roots, and the tokens that constraints force."""
        tree = group.method.fit(root_tree(context.last_tokens), context).limit_drafts(context.max_drafts)
        forced = tree.valid.astype(np.float64) if tree.nodes > 1 else None
        return DraftedTrees(None, indices, list(context.rows), tree, predicted=forced)

    def _draft(self, group: MethodGroup, indices: list[int], depths: list[int], context: Context) -> DraftedTrees:
        started = self._clock()
        try:
            tree = group.method.grow(context)
        except Exception as error:
            if len(self.groups) == 1:
                raise
            raise DraftError(group.bound) from error
        group.draft_seconds = self._clock() - started
        return DraftedTrees(group.bound, indices, list(context.rows), tree, depths, group.draft_seconds)

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
        if prediction is None or not accept.lossless or not (accept.takes_added or part.bound is None):
            return Continuation((), ())
        most = min(_MOST_PREDICTED, int(context.max_depth[i]))
        if context.max_drafts and (limit := context.max_drafts[i]) is not None:
            drafted = np.count_nonzero(part.tree.valid[part.indices.index(i)]) - 1
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
        try:
            tree: TokenTree = part.bound.method.draft.add_probes(part.tree, context.select(part.indices))
            return tree
        except Exception as error:
            if len(self.groups) == 1:
                raise
            raise DraftError(part.bound) from error

    def result_of(self, group: MethodGroup, step: StepResult) -> StepResult:
        """A group's part of a step, with the hidden states that its drafter needs in the order in which it asked."""
        waits = self._controller is not None and not self._controller.asks(group.bound)
        if waits or group.bound is self._paused:
            step = replace(step, drafting=False)
        if len(self.groups) == 1:
            return step
        part = step.select(group.indices, group.draft_seconds)
        if group.probe_offset:
            part = replace(part, tree=part.tree.shift_probe_ids(self._vocab, -group.probe_offset))
        return with_hidden_layers(part, self.hidden_layers, group.method.hidden_layers)
