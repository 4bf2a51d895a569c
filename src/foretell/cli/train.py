"""`foretell train`: make a speculator for a model."""

import shlex
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from foretell.cli import options
from foretell.cli.interrupt import Interrupt
from foretell.cli.show import LINE_SECONDS
from foretell.load import load
from foretell.train.loop import curve, model_card
from foretell.train.loop.curve import StepMetrics
from foretell.train.loop.measure import Measurement
from foretell.train.loop.settings import DRAFT_VOCAB, DatasetWeight, TrainingSettings, option_name
from foretell.train.loop.job import feature_source, prepare, find_recipe
from foretell.train.loop.trainer import Trainer, TrainingCallback
from foretell.utils.validation import explain

if TYPE_CHECKING:
    from accelerate import Accelerator

app = typer.Typer(pretty_exceptions_enable=False)
_DEFAULTS = TrainingSettings(recipe="", model="", data=(), out="")
"""What holds for options that are not given."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="NAME", help="What to train: eagle3, mlp_speculator, medusa …")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="DIR[=W]", help="Training set of `foretell data generate`; repeatable, each shown W times an epoch."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the speculator goes; holding a checkpoint, training goes on.")
    ],
    model: options.Model = options.DEFAULT_MODEL,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps; 0: as many as the epochs have.")] = _DEFAULTS.steps,
    epochs: Annotated[float, typer.Option(metavar="N", help="Times that every text is shown.")] = _DEFAULTS.epochs,
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a batch, all processes together.")
    ] = _DEFAULTS.batch_tokens,
    sequence: Annotated[int, typer.Option(metavar="N", help="Longest piece of a text.")] = _DEFAULTS.sequence,
    accumulate: Annotated[int, typer.Option(metavar="N", help="Batches of a step.")] = _DEFAULTS.accumulate,
    lr: Annotated[float, typer.Option(metavar="X", help="Learning rate, at its highest.")] = _DEFAULTS.lr,
    warmup: Annotated[int, typer.Option(metavar="N", help="Steps until it is reached.")] = _DEFAULTS.warmup,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="cosine (to a tenth) or constant.")] = _DEFAULTS.schedule,
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Of AdamW.")] = _DEFAULTS.weight_decay,
    clip: Annotated[float, typer.Option(metavar="X", help="Longest gradient.")] = _DEFAULTS.clip,
    ema: Annotated[
        float, typer.Option(metavar="X", help="Decay of a moving average of the weights; 0: none.")
    ] = _DEFAULTS.ema,
    precision: Annotated[str, typer.Option(metavar="NAME", help="bf16 (autocast) or no (float32).")] = _DEFAULTS.precision,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Draft the N most frequent tokens only; 0: all; unsaid: those of --from, or {DRAFT_VOCAB}.",
        ),
    ] = _DEFAULTS.draft_vocab,
    save_minutes: Annotated[float, typer.Option(metavar="M", help="Between checkpoints.")] = _DEFAULTS.save_minutes,
    measure_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between measurements; 0: at the end only.")
    ] = _DEFAULTS.measure_every,
    measure_prompts: Annotated[
        int, typer.Option(metavar="N", help="Prompts held back for measuring.")
    ] = _DEFAULTS.measure_prompts,
    measure_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens decoded for each.")] = _DEFAULTS.measure_tokens,
    patience: Annotated[
        int, typer.Option(metavar="K", help="Stop after K measurements without a new best; 0: never.")
    ] = _DEFAULTS.patience,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights, order and draws.")] = _DEFAULTS.seed,
    chosen: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of what is trained, as inner=1024; repeatable."),
    ] = None,
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Begin with the weights of a trained speculator: its folder, or the kind of an installed one.",
        ),
    ] = _DEFAULTS.init_from,
    features: Annotated[
        str, typer.Option(metavar="NAME", help="The target's states: cache, stream, or auto (what fits is cached).")
    ] = _DEFAULTS.features,
    cache_gib: Annotated[float, typer.Option(metavar="X", help="Most disk that cached states take.")] = _DEFAULTS.cache_gib,
) -> None:
    """Train a speculator on a model's own answers; stopped at any moment, the same command goes on.

    foretell data generate --self --tokens 300000 --out answers

    foretell train eagle3 --data answers --out my-eagle3

    foretell generate "Why is the sky blue?" --method eagle3 --draft-model my-eagle3
    """
    settings = _parse_settings(
        recipe=recipe, model=model, data=tuple(_parse_dataset(d) for d in data), out=str(out), steps=steps, epochs=epochs,
        batch_tokens=batch_tokens, sequence=sequence, accumulate=accumulate, lr=lr, warmup=warmup, schedule=schedule,
        weight_decay=weight_decay, clip=clip, ema=ema, precision=precision, draft_vocab=draft_vocab,
        save_minutes=save_minutes,
        measure_every=measure_every, measure_prompts=measure_prompts, measure_tokens=measure_tokens, patience=patience,
        seed=seed,
        options=dict(_parse_option(c) for c in chosen or ()), begin=begin, features=features, cache_gib=cache_gib,
    )  # fmt: skip
    run(settings, shlex.join(["foretell", *sys.argv[1:]]))


def run(settings: TrainingSettings, command: str) -> None:
    """Train, and write weights, curve and card.

    Raises:
        ValueError: anything that the settings, the data, the model or the machine do not allow.
    """
    kind = find_recipe(settings)
    on = _accelerator()
    quiet = not on.is_main_process
    model = load(settings.model, "bfloat16" if settings.precision == "bf16" else "float32", str(on.device))
    task = prepare(settings, model, kind)
    states = feature_source(task)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    watcher = _create_callback(quiet)
    with Interrupt() as interrupt, watcher if isinstance(watcher, ProgressBarCallback) else _Nothing():
        trainer = Trainer(task, on, states, watcher)
        trainer.run(lambda: interrupt.asked)
    if not quiet:
        curve.write_curve(trainer.out, trainer.curve, picture=True)
        model_card.write_card(trainer, command)
        Console(stderr=True).print(
            f"{settings.out}: {trainer.best:.3f} tokens per pass at step {trainer.best_step:,} of {trainer.step:,}; "
            f"use it with --draft-model {settings.out}", highlight=False, soft_wrap=True,
        )  # fmt: skip
    # A process that ends with its group alive may abort, and takes those with it that still write.
    on.wait_for_everyone()
    on.end_training()


def _accelerator() -> "Accelerator":
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ValueError("training needs accelerate; run: pip install 'foretell[train]'") from error
    # Some recipes leave parameters out of some steps; the target's embedding is a buffer that never changes.
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
    # Said outright, because several processes without a GPU find each other only then.
    cpu = not torch.cuda.is_available()
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[kwargs])


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
        raise ValueError(f"--data {text}: after = stands how often an epoch shows each text, as answers=0.5") from error


def _parse_option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {text}: write KEY=VALUE, as inner=1024")
    return key, value


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return


def _create_callback(quiet: bool) -> TrainingCallback:
    if quiet:
        return TrainingCallback()
    console = Console(stderr=True)
    return ProgressBarCallback(console) if console.is_terminal else LogCallback(console)


class LogCallback(TrainingCallback):
    """A line every half minute, and one for every measurement and checkpoint: for logs."""

    def __init__(self, console: Console) -> None:
        self._console, self._told, self._steps, self._best = console, 0.0, 0, ""
        self._first: tuple[float, int, int] = (time.monotonic(), 0, 0)

    def on_train_begin(self, step: int, steps: int, processes: int) -> None:
        """Training starts."""
        self._steps = steps
        self._say(f"step {step:,} of {steps:,}" + (f", {processes} processes" if processes > 1 else ""))

    def on_step_end(self, row: StepMetrics) -> None:
        """A step is done."""
        now = time.monotonic()
        if self._first[1] == 0:
            self._first = now, row.step, row.tokens
        elif now - self._told >= LINE_SECONDS or row.step == self._steps or row.tokens_per_pass is not None:
            self._told = now
            self._say(f"step {row.step:,} of {self._steps:,}  loss {row.loss:.4f}  {self._speed(row, now)}{self._best}")

    def _speed(self, row: StepMetrics, now: float) -> str:
        began, step, tokens = self._first
        rate = (now - began) / max(row.step - step, 1)
        left = rate * (self._steps - row.step)
        return f"{(row.tokens - tokens) / max(now - began, 1e-9):,.0f} tokens/s  {left / 60:,.0f} min left"

    def on_measure(self, measurement: Measurement, best: float) -> None:
        """Tokens per pass were measured."""
        self._best = f"  {measurement.tokens_per_pass:.3f} tokens/pass (best {best:.3f})"

    def on_save(self, step: int) -> None:
        """A checkpoint was written."""
        self._say(f"checkpoint of step {step:,}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class ProgressBarCallback(TrainingCallback):
    """A live bar for terminals."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"), BarColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn()
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, speed_estimate_period=600)
        self._task = self._bar.add_task("", total=1, text="")
        self._gain, self._before = "", (0.0, 0)

    def __enter__(self) -> "ProgressBarCallback":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_train_begin(self, step: int, steps: int, processes: int) -> None:
        """Training starts."""
        self._bar.update(self._task, completed=step, total=steps)

    def on_step_end(self, row: StepMetrics) -> None:
        """A step is done."""
        seconds, tokens = self._before
        speed = (row.tokens - tokens) / max(row.seconds - seconds, 1e-9)
        self._before = row.seconds, row.tokens
        self._bar.update(self._task, completed=row.step, text=f"loss {row.loss:.4f}  {speed:,.0f} tokens/s{self._gain}")

    def on_measure(self, measurement: Measurement, best: float) -> None:
        """Tokens per pass were measured."""
        self._gain = f"  {measurement.tokens_per_pass:.3f} tokens/pass (best {best:.3f})"
