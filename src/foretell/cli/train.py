"""`foretell train`: make a speculator for a model."""

import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from foretell.cli import options
from foretell.cli.commands import add_group_commands
from foretell.cli.given import refuse_unused
from foretell.cli.interrupt import Interrupt
from foretell.cli.progress import PROGRESS_INTERVAL, TimeLeft
from foretell.cli.setup import load_model
from foretell.cli.train_exits import exits
from foretell.train.loop.accelerator import create_accelerator
from foretell.train.loop.curve import StepMetrics, write_curve
from foretell.train.loop.job import dtype_of, feature_source, find_recipe, prepare
from foretell.train.loop.measure import Measurement
from foretell.train.loop.model_card import write_card
from foretell.train.loop.settings import DatasetWeight, TrainingSettings, option_name
from foretell.train.loop.trainer import Trainer, TrainingCallback
from foretell.utils.assignments import split_assignment
from foretell.utils.validation import explain


class TrainGroup(TyperGroup):
    """`foretell train exits` and others are commands of their own; any other `foretell train NAME` trains a
    speculator.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No arguments at all mean `--help`."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that reads these arguments."""
        if args[0] in _others:
            return super().resolve_command(ctx, args)
        return "", self.get_command(ctx, _SPECULATOR), args


_SPECULATOR, _HELP = "train", {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=TrainGroup,
    pretty_exceptions_enable=False,
    # The group has no options of its own: `--help` is that of the command.
    context_settings={"help_option_names": [], "ignore_unknown_options": True, "allow_interspersed_args": False},
)
_BARRIER_SECONDS = 0.2
"""Time for another thread to free a barrier."""


@app.command(_SPECULATOR, context_settings=_HELP)
@options.with_settings(TrainingSettings(recipe="", model="", data=(), out=""))
def train(
    ctx: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="What to train: eagle3, medusa …; see also `train exits`, `train free`, `train sparsity`, …",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="DIR[=W]", help="Data set of `foretell data generate`, each document W times per epoch; repeatable."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the speculator; training resumes from a checkpoint in it.")
    ],
    model: options.Model = options.DEFAULT_MODEL,
    settings: options.Settings = options.NO_SETTINGS,
    recipe_options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Option of the recipe, as inner=1024; repeatable."),
    ] = None,
) -> None:
    """Train a speculator on a model's own answers; the same command resumes an interrupted training.

    foretell data generate --self --tokens 300000 --out answers

    foretell train eagle3 --data answers --out my-eagle3

    foretell generate "Why is the sky blue?" --method eagle3 --draft-model my-eagle3
    """
    refuse_unused(ctx, ("epochs",), "--steps says how long the training is", bool(settings["steps"]))
    refuse_unused(ctx, ("patience",), "--measure-every 0 measures at the end only", not settings["measure_every"])
    streams = settings["features"] == "stream"
    refuse_unused(ctx, ("cache_gib",), "--features stream keeps no hidden states", streams)
    given = _parse_settings(
        **settings, recipe=recipe, model=model, data=tuple(_parse_dataset(d) for d in data), out=str(out),
        options=dict(split_assignment(o, "--set", "inner=1024") for o in recipe_options or ()),
    )  # fmt: skip
    run(given, shlex.join(["foretell", *sys.argv[1:]]))


app.command("exits", context_settings=_HELP)(exits)
_others = {"exits", *add_group_commands(app, "train", context_settings=_HELP)}
"""Commands beside the training of speculators."""


def run(settings: TrainingSettings, command: str) -> None:
    """Train, and write weights, curve and model card.

    Raises:
        ValueError: invalid settings, data that do not fit the model, or a lack of memory or disk space.
    """
    recipe = find_recipe(settings)
    accelerator = create_accelerator()
    quiet = not accelerator.is_main_process
    dtype = str(dtype_of(settings)).removeprefix("torch.")
    job = prepare(settings, load_model(settings.model, dtype, str(accelerator.device)), recipe)
    features = feature_source(job)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    progress = None if quiet else TrainingProgress(console, console.is_terminal)
    with Interrupt() as interrupt, progress or nullcontext():
        trainer = Trainer(job, accelerator, features, progress or TrainingCallback())
        trainer.run(lambda: interrupt.requested)
    if not quiet:
        write_curve(trainer.out, trainer.curve, with_plot=True)
        write_card(trainer, command)
        console.print(
            f"{settings.out}: {trainer.best:.3f} tokens per pass at step {trainer.best_step:,} of {trainer.step:,}; "
            f"use it with {job.recipe.usage(settings.out)}", highlight=False, soft_wrap=True,
        )  # fmt: skip
    # A process that exits before its process group is destroyed may abort others that still write.
    accelerator.wait_for_everyone()
    # A thread of Gloo takes the GIL to free the last barrier. Destroying the group waits for that thread with the GIL
    # held, so the thread must be done by then.
    if accelerator.num_processes > 1:
        time.sleep(_BARRIER_SECONDS)
    accelerator.end_training()


def _parse_settings(**values: object) -> TrainingSettings:
    try:
        return TrainingSettings.model_validate(values)
    except ValidationError as error:
        key, _, message = explain(error).partition(": ")
        raise ValueError(f"{option_name(key)}: {message}") from error


def _parse_dataset(text: str) -> DatasetWeight:
    folder, _, weight = text.rpartition("=")
    if not folder:
        return DatasetWeight(folder=text, weight=1.0)
    try:
        return DatasetWeight(folder=folder, weight=float(weight))
    except ValueError as error:
        raise ValueError(
            f"--data {text}: write DIR=W, W being how often an epoch shows each document, as answers=0.5"
        ) from error


class TrainingProgress(TrainingCallback):
    """Shows a bar on a terminal, or prints a line every half minute and for every measurement and checkpoint."""

    def __init__(self, console: Console, bar: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, speed_estimate_period=600, disable=not bar)
        self._task = self._bar.add_task("", total=1)
        self._console, self._is_bar, self._last_line, self._steps, self._best = console, bar, 0.0, 0, ""
        self._first: tuple[float, int] | None = None
        """Time and tokens of the first step."""
        self._left = TimeLeft()

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_train_begin(self, step: int, steps: int, processes: int) -> None:
        """Training starts."""
        self._steps = steps
        self._bar.update(self._task, completed=step / steps)
        self._print(f"step {step:,} of {steps:,}" + (f", {processes} processes" if processes > 1 else ""))

    def on_step_end(self, row: StepMetrics, share: float) -> None:
        """A step is done."""
        now, left = time.monotonic(), self._left(share)
        is_first = self._first is None
        start, tokens = self._first = self._first or (now, row.tokens)
        speed = (row.tokens - tokens) / max(now - start, 1e-9)
        text = f"step {row.step:,} of {self._steps:,}  loss {row.loss:.4f}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=share, description=text + self._best)
        is_due = now - self._last_line >= PROGRESS_INTERVAL or share == 1 or row.tokens_per_pass is not None
        if is_due and not is_first:
            self._last_line = now
            self._print(f"{text}  {left}{self._best}")

    def on_measure(self, measurement: Measurement, best: float) -> None:
        """Tokens per pass were measured."""
        self._best = f"  {measurement.tokens_per_pass:.3f} tokens/pass (best {best:.3f})"

    def on_save(self, step: int) -> None:
        """A checkpoint was written."""
        self._print(f"checkpoint of step {step:,}")

    def _print(self, text: str) -> None:
        if not self._is_bar:
            self._console.print(text, highlight=False, soft_wrap=True)
