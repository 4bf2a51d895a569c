"""Where a training stands, on disk: written beside the last one and moved into its place whole, so that a kill at any
moment leaves a good one.
"""

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Shaped
from pydantic import BaseModel, ConfigDict, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from foretell.train.loop.curve import Row
from foretell.train.loop.settings import Settings, flag
from foretell.utils.store import write_synced
from foretell.utils.validation import read_model

FOLDER = "checkpoint"
_STATE = "state.json"

Tensors = dict[str, Shaped[torch.Tensor, "*shape"]]


class Stand(BaseModel):
    """Everything about where a training stands that is not a tensor.

    Random draws are seeded by step, so the step stands for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings
    target: str
    """Its fingerprint."""
    documents: int
    """That are trained on: a data set that has grown makes other batches."""
    processes: int
    """Whose tensors these are: one unless weights are sharded."""
    step: int
    """Steps done."""
    seconds: float
    best: float
    """Most tokens per pass measured."""
    best_step: int
    stale: int
    """Measurements since then."""
    stopped: bool
    """It is over, whatever the settings say of steps."""
    curve: tuple[Row, ...]

    @model_validator(mode="after")
    def _whole(self) -> "Stand":
        if len(self.curve) != self.step or any(row.step != i for i, row in enumerate(self.curve, 1)):
            raise ValueError(f"the curve is not that of {self.step} steps")
        return self


@dataclass(frozen=True)
class Store:
    """The checkpoints of one training, of which the newest complete one counts. `rank` 0 moves them into place."""

    out: Path
    rank: int = 0

    @property
    def _folder(self) -> Path:
        return self.out / FOLDER

    def newest(self) -> Path | None:
        """Folder of the newest complete checkpoint."""
        found = sorted(f for f in self._folder.glob("step-*") if f.name[5:].isdecimal())
        return found[-1] if found else None

    def stand(self) -> Stand | None:
        """Where the training stands; None where it has not begun.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        folder = self.newest()
        if folder is None:
            return None
        return read_model(Stand, folder / _STATE, f"delete {folder}")

    def tensors(self) -> Tensors:
        """Weights, optimizer and average of this process.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        folder = self.newest()
        assert folder is not None
        path = folder / f"tensors-{self.rank}.safetensors"
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged ({error}); delete {folder}") from error

    def damaged(self, tensor: str) -> ValueError:
        """The error of a checkpoint that lacks a tensor, or holds another one under its name."""
        return ValueError(
            f"{self.newest()}: damaged, or written by another version ({tensor} is missing or does not fit); "
            "delete it, and the training begins anew"
        )

    def write(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Lay down the tensors of this process for the checkpoint of `step`; it does not count before `finish`.

        Raises:
            ValueError: no space is left; the last checkpoint stays as it was.
        """
        part = self._part(step)
        with _room(part, self.newest()):
            part.mkdir(parents=True, exist_ok=True)
            packed = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            write_synced(part / f"tensors-{self.rank}.safetensors", save(packed))

    def finish(self, stand: Stand) -> None:
        """Move the checkpoint into place, and delete those before it.

        Raises:
            ValueError: no space is left; the last checkpoint stays as it was.
        """
        part = self._part(stand.step)
        with _room(part, self.newest()):
            write_synced(part / _STATE, stand.model_dump_json().encode())
            _sync(part)
        final = part.with_suffix("")
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        _sync(self._folder)
        for other in self._folder.iterdir():
            if other != final:
                shutil.rmtree(other)

    def _part(self, step: int) -> Path:
        return self._folder / f"step-{step:09d}.part"


def belongs(stand: Stand, settings: Settings, target: str, documents: int, processes: int) -> None:
    """Check that a checkpoint is of this training.

    Raises:
        ValueError: it is of another.
    """
    where = f"{settings.out} holds a checkpoint of another training"
    cure = "train with the same settings, or give another --out"
    name = stand.settings.changed(settings)
    if name is not None:
        then, now = (_shown(getattr(s, name)) for s in (stand.settings, settings))
        raise ValueError(f"{where}: {flag(name)} was {then} there and is {now} here; {cure}")
    if stand.target != target:
        raise ValueError(
            f"{where}: its target has the fingerprint {stand.target}, this one {target}; give another --out"
        )
    if stand.documents != documents:
        raise ValueError(
            f"{where}: it was trained on {stand.documents} texts, and the data has {documents} now; "
            "give another --out, and --from to begin with its weights"
        )
    if stand.processes != processes:
        raise ValueError(f"{where}: it is sharded for {stand.processes} processes, and these are {processes}")


def _shown(value: object) -> str:
    """As the command line would say it."""
    if isinstance(value, dict):
        value = tuple(f"{key}={said}" for key, said in value.items())
    parts = value if isinstance(value, tuple) else () if value is None else (value,)
    return " ".join(map(str, parts)) or "not given"


class _room:  # noqa: N801 (a context manager, named as one)
    """Turns a full disk into a sentence, and clears what could not be finished."""

    def __init__(self, part: Path, good: Path | None) -> None:
        self._part, self._good = part, good

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return
        shutil.rmtree(self._part, ignore_errors=True)
        last = "there is none yet" if self._good is None else f"that of step {int(self._good.name[5:])} stays"
        raise ValueError(
            f"no space left for a checkpoint in {self._part.parent}: {last}; free some and run the same command again"
        ) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
