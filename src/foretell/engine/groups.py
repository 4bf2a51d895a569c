"""The requests of a step by method: each method drafts for its own ones, and learns from its own part of the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree, concatenate_trees, join_probe_embeddings, root_tree
from foretell.draft.base import with_hidden_layers
from foretell.engine.method import AnyMethod, BoundMethod


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
    """The groups of a step, from drafting to its result. `vocab`: of the target; `clock` gives seconds."""

    def __init__(self, methods: Sequence[BoundMethod], vocab: int, clock: Callable[[], float]) -> None:
        self._vocab, self._clock = vocab, clock
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

    def propose(self, context: Context, unread: Sequence[Sequence[int]], ready: Bool[np.ndarray, " b"]) -> TokenTree:
        """The tree of each request below its unread tokens; only the requests that are `ready` to decode have drafts.

        Raises:
            DraftError: one of several methods failed. Exception: the only method failed.
        """
        if len(self.groups) == 1 and ready.all():
            return self.groups[0].method.propose(context).with_prefix(unread)
        count, drafted, parts = int(np.count_nonzero(ready)), list[MethodGroup](), list[TokenTree]()
        order = list[int]()
        for group in self.groups:
            drafting = [i for i in group.indices if ready[i]]
            if drafting:
                parts.append(self._draft(group, context.select(drafting), count - len(drafting)))
                drafted.append(group)
                order += drafting
        parts, offsets = join_probe_embeddings(parts, self._vocab)
        for group, offset in zip(drafted, offsets, strict=True):
            group.probe_offset = offset
        reading = np.flatnonzero(~ready).tolist()
        if reading:
            parts.append(root_tree([unread[i][-1] for i in reading]))
        tree = concatenate_trees(parts)
        return (tree.select(np.argsort(order + reading)) if len(parts) > 1 else tree).with_prefix(unread)

    def _draft(self, group: MethodGroup, context: Context, other_rows: int) -> TokenTree:
        if len(self.groups) == 1:
            return group.method.propose(context)
        started = self._clock()
        try:
            tree = group.method.propose(replace(context, other_rows=other_rows))
        except Exception as error:
            raise DraftError(group.bound) from error
        group.draft_seconds = self._clock() - started
        return tree

    def result_of(self, group: MethodGroup, step: StepResult) -> StepResult:
        """A group's part of a step, with the hidden states that its drafter needs in the order in which it asked."""
        if len(self.groups) == 1:
            return step
        part = step.select(group.indices, group.draft_seconds)
        if group.probe_offset:
            part = replace(part, tree=part.tree.shift_probe_ids(self._vocab, -group.probe_offset))
        return with_hidden_layers(part, self.hidden_layers, group.method.hidden_layers)
