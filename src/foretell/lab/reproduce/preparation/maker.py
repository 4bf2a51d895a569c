"""Makes one thing that a method drafts with, in a folder of its own."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Protocol

from foretell.api import Model
from foretell.lab.reproduce.preparation.texts import Texts
from foretell.train.loop.trainer import TrainingCallback

Identity = Mapping[str, object]


class StopRequest(Protocol):
    """Whether the user wants to stop."""

    requested: bool


def _never() -> AbstractContextManager[StopRequest]:
    return nullcontext(SimpleNamespace(requested=False))


@dataclass(frozen=True)
class PreparationSettings:
    """How things are made. `steps`: of every training, None: those of its kind. `command`: for model cards.
    `stoppable`: lets a training end with a checkpoint when the user stops it. `callback`: observes a training.
    `report`: is told what is being made.
    """

    steps: int | None = None
    command: str = "foretell reproduce --train"
    stoppable: Callable[[], AbstractContextManager[StopRequest]] = _never
    callback: Callable[[], TrainingCallback] = TrainingCallback
    report: Callable[[str], None] = lambda _: None


class Maker(ABC):
    """Something that a method drafts with, for one target."""

    name: ClassVar[str] = ""

    def __init__(self, model: Model, texts: Texts, settings: PreparationSettings) -> None:
        self.model, self.texts, self.settings = model, texts, settings

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """All that decides what is made, beside the target."""

    @abstractmethod
    def make(self, folder: Path) -> str:
        """Write it into a folder, or go on with what an interruption left there; returns a sentence on how.

        Raises:
            ValueError: it cannot be made for this model.
        """

    def clean(self, folder: Path) -> None:
        """Delete what only an interrupted `make` would read."""

    def drafts(self, folder: Path) -> tuple[Model | Path, ...]:
        """The draft models and speculators that the method gets."""
        return (folder,)

    def options(self, folder: Path) -> Mapping[str, object]:
        """The options that the method gets."""
        return {}

    @property
    def label(self) -> str:
        """Name and identity, as the folder is called."""
        return f"{self.name}-{sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:8]}"
