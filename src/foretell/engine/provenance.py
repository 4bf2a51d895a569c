"""What was drafted in a pass, by which part of the method, and what became of it."""

from dataclasses import dataclass

from foretell.core.context import StepResult
from foretell.core.draft_origins import draft_paths
from foretell.engine.statistics import StepTime

TARGET = "target"
"""Origin of a token that the target chose itself."""


@dataclass(frozen=True)
class DraftedToken:
    """A drafted token. `parent`: index of the draft before it among those of the pass; -1: it follows the sequence."""

    token: int
    parent: int
    origin: str
    """The drafter's name, or `grammar` for a token that a constraint forced."""
    accepted: bool
    score: float | None = None
    """The drafter's estimate of the probability that it is accepted."""


@dataclass(frozen=True)
class PassDrafts:
    """The drafts of a request in one pass, and where its new tokens come from."""

    tokens: tuple[int, ...]
    """The new tokens."""
    origins: tuple[str, ...]
    """Of the new tokens; that of the last one is `target`, unless the answer ended within the drafts."""
    drafted: tuple[DraftedToken, ...]
    time: StepTime
    """Of the pass, for all its requests together."""


def describe_pass(step: StepResult, i: int, tokens: tuple[int, ...], drafter: str, time: StepTime) -> PassDrafts:
    """The drafts of request `i` in a step, of which it got `tokens`; `drafter`: origin of drafts without a record."""
    tree, row, recorded = step.tree, step.context.rows[i], step.context.origins
    paths, first = draft_paths(tree, i), int(tree.prefix_length[i])
    origins = {n: drafter if recorded is None else recorded.find(row, p, drafter) for n, p in paths.items()}
    kept, place = step.paths[i][first:], {node: index for index, node in enumerate(paths)}
    drafted = tuple(
        DraftedToken(
            token=path[-1],
            parent=place.get(int(tree.parent[i, node]), -1),
            origin=origins[node],
            accepted=node in kept,
            score=None if tree.score is None else float(tree.score[i, node]),
        )
        for node, path in paths.items()
    )
    return PassDrafts(tokens, tuple([*(origins[n] for n in kept), TARGET][: len(tokens)]), drafted, time)
