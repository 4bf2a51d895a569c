"""Checkpoints of a training.

A checkpoint is written to a temporary folder and then renamed, so that an interruption leaves a complete one.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from pydantic import model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from foretell.train.loop.curve import StepMetrics
from foretell.train.loop.settings import TrainingSettings, option_name
from foretell.train.recipe.base import TensorDict
from foretell.utils.paths import require_empty
from foretell.utils.store import write_synced
from foretell.utils.unfinished import put_in_place, remove
from foretell.utils.validation import FrozenModel, read_model

FOLDER = "checkpoint"
_STEP = re.compile(r"step-\d+(\.part)?")
"""Names of checkpoints."""
_STATE = "state.json"
_ADAM = ("step", "exp_avg", "exp_avg_sq")
"""State of AdamW for every parameter that has had a gradient."""


class CheckpointState(FrozenModel):
    """The state of a training except its tensors. Random numbers need no state: they are seeded by step."""

    step: int
    """Finished steps."""
    seconds: float


S = TypeVar("S", bound=CheckpointState)


class TrainState(CheckpointState):
    """The state of a training of the `Trainer`."""

    settings: TrainingSettings
    target: str
    """Fingerprint of the target."""
    documents: int
    """Documents that are trained on; more documents would make other batches."""
    cpu_seconds: float = 0.0
    """Processor time of the steps."""
    processes: int
    """Processes that hold the tensors; 1 unless weights are sharded."""
    best: float
    """Most tokens per pass measured."""
    best_step: int
    stale: int
    """Measurements since the best one."""
    stopped: bool
    """Early stopping has ended the training."""
    curve: tuple[StepMetrics, ...]

    @model_validator(mode="after")
    def _check_curve(self) -> "TrainState":
        if len(self.curve) != self.step or any(row.step != i for i, row in enumerate(self.curve, 1)):
            raise ValueError(f"the curve does not have {self.step} steps")
        return self


@dataclass(frozen=True)
class CheckpointStore(Generic[S]):
    """Reads and writes the checkpoints of one training; the latest complete one counts.

    `rank`: of the process whose tensors are read and written. Only rank 0 calls `commit`.
    """

    out: Path
    kind: type[S]
    """What a checkpoint holds beside its tensors."""
    rank: int = 0

    @property
    def _folder(self) -> Path:
        return self.out / FOLDER

    def latest(self) -> Path | None:
        """Folder of the latest complete checkpoint."""
        checkpoints = sorted(f for f in self._folder.glob("step-*") if f.name.removeprefix("step-").isdecimal())
        return checkpoints[-1] if checkpoints else None

    def load_state(self) -> S | None:
        """The state of the latest checkpoint; None: there is none, and a training begins here.

        Raises:
            ValueError: the checkpoint is damaged, or the folder holds something that a training would overwrite.
        """
        folder = self.latest()
        if folder is None:
            self._claim()
            return None
        return read_model(self.kind, folder / _STATE, f"delete {folder}")

    def _claim(self) -> None:
        """Mark a new or empty folder as that of a training, which may write there before its first checkpoint."""
        if self._folder.is_dir():
            return
        try:
            require_empty(self.out)
        except ValueError:
            # Another process of this training may have made it in between.
            if not self._folder.is_dir():
                raise
        self._folder.mkdir(parents=True, exist_ok=True)

    def load_tensors(self) -> TensorDict:
        """Tensors of this process in the latest checkpoint: weights, optimizer, moving average.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        folder = self.latest()
        assert folder is not None
        path = folder / f"tensors-{self.rank}.safetensors"
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged ({error}); delete {folder}") from error

    def restore(self, tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of the latest checkpoint into those of the same names.

        Raises:
            ValueError: one is missing or has the wrong shape.
        """
        for name, tensor in into.items():
            stored = tensors.get(name)
            if stored is None or stored.shape != tensor.shape:
                raise self.missing_tensor_error(name)
            tensor.copy_(stored)

    def missing_tensor_error(self, tensor: str) -> ValueError:
        """The error for a tensor that is missing or has the wrong shape."""
        return ValueError(
            f"{self.latest()}: damaged, or written by another version ({tensor} is missing or does not fit); "
            "delete it, and training starts from the beginning"
        )

    def write_tensors(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of this process for the checkpoint of `step`, which `commit` completes.

        Raises:
            ValueError: the disk is full; the previous checkpoint stays.
        """
        part = self._part(step)
        with _report_full_disk(part, self.latest()):
            part.mkdir(parents=True, exist_ok=True)
            packed = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            write_synced(part / f"tensors-{self.rank}.safetensors", save(packed))

    def commit(self, state: S) -> None:
        """Complete the checkpoint, and delete earlier ones.

        Raises:
            ValueError: the disk is full; the previous checkpoint stays.
        """
        part = self._part(state.step)
        with _report_full_disk(part, self.latest()):
            write_synced(part / _STATE, state.model_dump_json().encode())
            _sync(part)
        final = part.with_suffix("")
        put_in_place(part, final)
        _sync(self._folder)
        for other in self._folder.iterdir():
            if other != final and _STEP.fullmatch(other.name):
                remove(other)

    def _part(self, step: int) -> Path:
        return self._folder / f"step-{step:09d}.part"


def optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> TensorDict:
    """Adam's state of named parameters, not copied."""
    return {
        f"optimizer/{part}/{name}": value
        for name, parameter in parameters.items()
        for part, value in optimizer.state[parameter].items()
    }


def begin_optimizer(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give parameters a state of zeros where `tensors` holds Adam's state of them, to be restored from it."""
    for name, parameter in parameters.items():
        if any(f"optimizer/{part}/{name}" in tensors for part in _ADAM):
            zeros = {part: torch.zeros_like(parameter, requires_grad=False) for part in _ADAM[1:]}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}


def check_resumable(state: TrainState, settings: TrainingSettings, target: str, documents: int, processes: int) -> None:
    """Check that training can resume from a checkpoint.

    Raises:
        ValueError: settings, target, data or number of processes differ.
    """
    where = f"{settings.out} holds a checkpoint of another training"
    name = state.settings.first_difference(settings)
    if name is not None:
        then, now = (as_argument(getattr(s, name)) for s in (state.settings, settings))
        raise other_training_error(settings.out, option_name(name), then, now)
    if state.target != target:
        raise ValueError(
            f"{where}: its target has the fingerprint {state.target}, this one {target}; give another --out"
        )
    if state.documents != documents:
        raise ValueError(
            f"{where}: it was trained on {state.documents} documents, and the data has {documents} now; "
            "give another --out, and --from to start with its weights"
        )
    if state.processes != processes:
        raise ValueError(f"{where}: it is sharded for {state.processes} processes, and these are {processes}")


def other_training_error(out: str | Path, name: str, then: object, now: object) -> ValueError:
    """The error for a checkpoint that was written with another value of an option."""
    return ValueError(
        f"{out} holds a checkpoint of another training: {name} was {then} there and is {now} here; train with the same "
        "settings, or give another --out"
    )


def as_argument(value: object) -> str:
    """A setting as a command-line argument."""
    if isinstance(value, dict):
        value = tuple(f"{key}={item}" for key, item in value.items())
    parts = value if isinstance(value, tuple | list) else () if value is None else (value,)
    return " ".join(map(str, parts)) or "not given"


@contextmanager
def _report_full_disk(part: Path, latest: Path | None) -> Iterator[None]:
    """Delete the incomplete checkpoint `part` and raise a ValueError when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(part, ignore_errors=True)
        last = "there is none yet" if latest is None else f"that of step {step_of(latest)} stays"
        raise ValueError(
            f"no space left for a checkpoint in {part.parent}: {last}; free some and run the same command again"
        ) from error


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step-"))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
