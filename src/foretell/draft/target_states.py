"""What a drafter keeps of the target's hidden states until it reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import StepResult
from foretell.utils.transfer import movable_view


class TargetStates(NamedTuple):
    """The target's hidden states at some positions, as rows of those of a whole pass, so that they are not copied."""

    hidden_states: tuple[Float[torch.Tensor, "n d"], ...]
    place: Int[np.ndarray, " t"]
    """Row of every position."""


def concatenate_states(parts: Sequence[TargetStates]) -> TargetStates:
    """The states of all parts, in order; copied where they are of several passes."""
    if len(parts) == 1:
        return parts[0]
    shared = parts[0].hidden_states
    if all(p.hidden_states is shared for p in parts):
        return TargetStates(shared, np.concatenate([p.place for p in parts]))
    return copy_states(parts)


def copy_states(parts: Sequence[TargetStates]) -> TargetStates:
    """A copy of the states of all parts, in order, without the passes that they are rows of."""
    states = tuple(_gather(parts, i) for i in range(len(parts[0].hidden_states)))
    return TargetStates(states, np.arange(len(states[0])))


def _gather(parts: Sequence[TargetStates], layer: int) -> torch.Tensor:
    """A copy of the states of one layer."""
    first = parts[0].hidden_states[layer]
    out: torch.Tensor = first.new_empty(sum(len(p.place) for p in parts), first.shape[1])
    if first.device.type == "cpu":
        np.concatenate([movable_view(p.hidden_states[layer])[p.place] for p in parts], out=movable_view(out))
    else:
        torch.cat([p.hidden_states[layer][torch.from_numpy(p.place).to(first.device)] for p in parts], out=out)
    return out


@dataclass
class PrefixState:
    """State of one request: how many positions the layer has read, from position `start` on, and the target's states at
    the positions after.
    """

    start: int = 0
    length: int = 0
    pending: list[TargetStates] = field(default_factory=list)
    """Those of several passes, not copied until they are read."""

    @property
    def pending_count(self) -> int:
        """Number of positions to be read."""
        return sum(len(part.place) for part in self.pending)

    @property
    def count(self) -> int:
        """Number of positions that are known: those that were read, and those to be read."""
        return self.length + self.pending_count

    @property
    def end(self) -> int:
        """The first position that is not known."""
        return self.start + self.count

    def truncate(self, end: int) -> None:
        """Drop the positions from `end` on, which is not before the first one."""
        self.pending = self.next(max(0, end - self.start - self.length))
        self.length = min(self.length, end - self.start)

    def count_as_read(self, count: int) -> None:
        """Forget the states of the next `count` positions, which the layer has read."""
        left = self.pending[:]
        for part in self.next(count):
            rest = left.pop(0).place[len(part.place) :]
            if len(rest):
                left.insert(0, TargetStates(part.hidden_states, rest))
        self.pending = left
        self.length += count

    def detach(self) -> None:
        """Copy the pending states, so that the passes that they are rows of can be forgotten."""
        self.pending = [copy_states(self.pending)]

    def next(self, count: int) -> list[TargetStates]:
        """The states of the next `count` positions to be read."""
        parts = list[TargetStates]()
        for hidden_states, place in self.pending:
            if count > 0:
                parts.append(TargetStates(hidden_states, place[:count]))
                count -= len(place)
        return parts


class ObservedStep(NamedTuple):
    """What the drafter needs of a step; logits are not held."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of the sequences after the step."""
    paths: tuple[tuple[int, ...], ...]
    hidden_index: Int[np.ndarray, "b n"]
    hidden_states: tuple[Float[torch.Tensor, "n d"], ...]
    first: tuple[int, ...]
    """Position at which the drafter begins to read each sequence."""
    positions: int
    """Number of positions whose states it holds."""

    @staticmethod
    def of(step: StepResult, window: int | None = None) -> "ObservedStep":
        """From the step's result. `window`: last tokens of a prompt that the drafter reads; None: all."""
        texts, output = step.context.sequences, step.output
        first = (0,) * len(texts)
        if window is not None:
            first = tuple(max(0, text.prompt_length - window) for text in texts)
        return ObservedStep(
            step.context.rows,
            step.start_positions,
            lengths=tuple(text.length for text in texts),
            paths=step.paths,
            hidden_index=output.hidden_index,
            hidden_states=output.hidden_states,
            first=first,
            positions=step.tree.active_count,
        )
