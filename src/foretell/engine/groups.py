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


@dataclass(frozen=True)
class MethodGroup:
    """The requests of a step that one method decodes, by their indices in the step."""

    bound: BoundMethod
    indices: tuple[int, ...]

    @property
    def method(self) -> AnyMethod:
        """The method."""
        return self.bound.method


@dataclass(frozen=True)
class Proposal:
    """The trees of a step, and for each group the time that it took to draft (0: not measured apart), and what was
    added to the ids of its probe embeddings.
    """

    tree: TokenTree
    draft_seconds: tuple[float, ...]
    probe_offsets: tuple[int, ...]


def group_by_method(methods: Sequence[BoundMethod]) -> list[MethodGroup]:
    """The groups of requests that these methods decode."""
    if all(method is methods[0] for method in methods):
        return [MethodGroup(methods[0], tuple(range(len(methods))))]
    indices = dict[BoundMethod, list[int]]()
    for i, method in enumerate(methods):
        indices.setdefault(method, []).append(i)
    return [MethodGroup(method, tuple(which)) for method, which in indices.items()]


def required_hidden_layers(groups: Sequence[MethodGroup]) -> tuple[int, ...]:
    """The hidden layers that the drafters need; of a single one, in its order."""
    if len(groups) == 1:
        return groups[0].method.hidden_layers
    return tuple(sorted({layer for group in groups for layer in group.method.hidden_layers}))


def propose(
    groups: Sequence[MethodGroup],
    context: Context,
    unread: Sequence[Sequence[int]],
    ready: Bool[np.ndarray, " b"],
    vocab: int,
    clock: Callable[[], float],
) -> Proposal:
    """The tree of each request below its unread tokens; only the requests that are `ready` to decode have drafts.

    Raises:
        DraftError: one of several methods failed. Exception: the only method failed.
    """
    if len(groups) == 1 and ready.all():
        return Proposal(groups[0].method.propose(context).with_prefix(unread), (0.0,), (0,))
    parts, order, times = list[TokenTree](), list[int](), [clock()]
    for group in groups:
        drafting = [i for i in group.indices if ready[i]]
        if drafting:
            part = context.select(drafting)
            if len(groups) > 1:
                part = replace(part, other_rows=int(np.count_nonzero(ready)) - len(drafting))
            parts.append(_propose(group, part, len(groups) > 1))
            order += drafting
        times.append(clock())
    reading = np.flatnonzero(~ready).tolist()
    parts, offsets = join_probe_embeddings(parts, vocab)
    if reading:
        parts.append(root_tree([unread[i][-1] for i in reading]))
    tree = concatenate_trees(parts)
    if len(parts) > 1:
        tree = tree.select(np.argsort([*order, *reading]))
    drafted = iter(offsets)
    return Proposal(
        tree.with_prefix(unread),
        tuple(np.diff(times).tolist()),
        tuple(next(drafted) if any(ready[i] for i in group.indices) else 0 for group in groups),
    )


def _propose(group: MethodGroup, context: Context, several: bool) -> TokenTree:
    try:
        return group.method.propose(context)
    except Exception as error:
        if several:
            raise DraftError(group.bound) from error
        raise


def results_by_group(
    groups: Sequence[MethodGroup], step: StepResult, proposal: Proposal, hidden_layers: Sequence[int], vocab: int
) -> list[StepResult]:
    """Each group's part of a step, with the hidden states that its drafter needs, in the order in which it asked for
    them.
    """
    out = []
    for group, seconds, offset in zip(groups, proposal.draft_seconds, proposal.probe_offsets, strict=True):
        part = step.select(group.indices, seconds)
        if offset:
            part = replace(part, tree=part.tree.shift_probe_ids(vocab, -offset))
        out.append(with_hidden_layers(part, hidden_layers, group.method.hidden_layers))
    return out
