"""Checkpoints of gradient descent, from which an interrupted training goes on as an uninterrupted one."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Int

from foretell.train.loop.checkpoint import (
    FOLDER,
    CheckpointState,
    CheckpointStore,
    as_argument,
    begin_optimizer,
    optimizer_tensors,
    other_training_error,
)

_RANDOM = "random"
"""The state of torch's random numbers."""


class DescentState(CheckpointState):
    """The state of a descent except its tensors."""

    training: dict[str, str]
    losses: tuple[float, ...]


@dataclass
class Checkpoints:
    """Those of one training whose result takes the place of the folder `out`, and of its checkpoints, at the end."""

    out: Path
    training: Mapping[str, object]
    """All that decides the result, by the names of options; with others the training does not go on."""
    save_minutes: float
    should_stop: Callable[[], bool] = lambda: False
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What changes in a training beside its parameters."""

    def __post_init__(self) -> None:
        self._store, self._saved, self._begun = CheckpointStore(self.out, DescentState), time.monotonic(), 0.0

    def part(self, name: str) -> "Checkpoints":
        """Those of one of several descents that follow each other, kept beside the others'."""
        return replace(self, out=self.out / FOLDER / name)

    @torch.no_grad()
    def resume(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """Set everything to what it was in the latest checkpoint; the losses of the steps that are done.

        Raises:
            ValueError: the checkpoint is damaged or of another training.
        """
        (self.out / FOLDER).mkdir(parents=True, exist_ok=True)
        self._begun = self._saved = time.monotonic()
        state = self._store.load_state()
        if state is None:
            return []
        for name, value in self.training.items():
            then, now = state.training.get(name, "not known"), as_argument(value)
            if then != now:
                raise other_training_error(self.out, name, then, now)
        tensors = self._store.load_tensors()
        begin_optimizer(_parameters(optimizer), optimizer, tensors)
        random = torch.get_rng_state()
        self._store.restore(tensors, self._tensors(optimizer) | {_RANDOM: random})
        torch.set_rng_state(random)
        self._begun -= state.seconds
        return list(state.losses)

    def after_step(self, optimizer: torch.optim.Optimizer, losses: Sequence[float], finished: bool) -> None:
        """Write a checkpoint if it is time.

        Raises:
            ValueError: the disk is full; the previous checkpoint stays.
            KeyboardInterrupt: the training shall stop; a checkpoint was written.
        """
        stop, now = self.should_stop(), time.monotonic()
        if not (stop or finished or now - self._saved >= 60 * self.save_minutes):
            return
        self._store.write_tensors(len(losses), self._tensors(optimizer) | {_RANDOM: torch.get_rng_state()})
        training = {name: as_argument(value) for name, value in self.training.items()}
        seconds = now - self._begun
        self._store.commit(DescentState(step=len(losses), seconds=seconds, training=training, losses=tuple(losses)))
        self._saved = time.monotonic()
        if stop and not finished:
            raise KeyboardInterrupt

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        parameters = _parameters(optimizer)
        weights = {f"weight/{i}": p.detach() for i, p in parameters.items()}
        buffers = {f"buffer/{name}": buffer for name, buffer in self.buffers.items()}
        return weights | buffers | optimizer_tensors(parameters, optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The parameters by their numbers."""
    return {str(i): p for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def digest(tokens: Int[torch.Tensor, " n"]) -> str:
    """A short name of a text."""
    return sha256(tokens.numpy().tobytes()).hexdigest()[:12]
