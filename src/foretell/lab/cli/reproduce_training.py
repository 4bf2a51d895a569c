"""The part of `foretell reproduce` that makes what nothing ships."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from foretell.api import Model
from foretell.cli.interrupt import Interrupt
from foretell.cli.train import TrainingProgress
from foretell.lab.reproduce import Preparation, PreparationSettings
from foretell.train.data.dataset import Dataset
from foretell.train.loop.accelerator import create_accelerator

_FOLDER = "made"
"""In the folder of the report."""


def check_training(
    train: bool, out: Path | None, drafts: Sequence[str] | None, data: Path | None, steps: int | None
) -> None:
    """Check that the options of training go together.

    Raises:
        ValueError: they do not, the set of texts is not one, or a package for training is missing.
    """
    if not train:
        given = "--train-data" if data is not None else "--train-steps" if steps is not None else ""
        if given:
            raise ValueError(f"{given} is for trainings, and none was asked for; add --train")
        return
    if out is None:
        raise ValueError("--train keeps what it makes in the folder of the report; name one with --out DIR")
    if drafts:
        raise ValueError(
            f"--train makes what methods draft with, and --draft-model {drafts[0]} names it; give one of the two"
        )
    if data is not None:
        Dataset.open(data)
    create_accelerator()


def create_preparation(model: Model, folder: Path, data: Path | None, steps: int | None, quiet: bool) -> Preparation:
    """What makes the things that methods need and nothing ships."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    settings = PreparationSettings(
        steps=steps,
        command=shlex.join(["foretell", *sys.argv[1:]]),
        stoppable=Interrupt,
        callback=lambda: TrainingProgress(console, bar=False),
        report=console.print,
    )
    return Preparation(model, folder / _FOLDER, data, settings)
