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
from foretell.cli.show import PROGRESS_INTERVAL
from foretell.load import load
from foretell.train.loop import card, curve
from foretell.train.loop.curve import Row
from foretell.train.loop.measure import Measured
from foretell.train.loop.settings import DRAFT_VOCAB, Portion, Settings, flag
from foretell.train.loop.task import features, prepare, understood
from foretell.train.loop.trainer import Trainer, Watcher
from foretell.utils.validation import explain

if TYPE_CHECKING:
    from accelerate import Accelerator

app = typer.Typer(pretty_exceptions_enable=False)
_SAID = Settings(recipe="", model="", data=(), out="")
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
    steps: Annotated[int, typer.Option(metavar="N", help="Steps; 0: as many as the epochs have.")] = _SAID.steps,
    epochs: Annotated[float, typer.Option(metavar="N", help="Times that every text is shown.")] = _SAID.epochs,
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a batch, all processes together.")
    ] = _SAID.batch_tokens,
    sequence: Annotated[int, typer.Option(metavar="N", help="Longest piece of a text.")] = _SAID.sequence,
    accumulate: Annotated[int, typer.Option(metavar="N", help="Batches of a step.")] = _SAID.accumulate,
    lr: Annotated[float, typer.Option(metavar="X", help="Learning rate, at its highest.")] = _SAID.lr,
    warmup: Annotated[int, typer.Option(metavar="N", help="Steps until it is reached.")] = _SAID.warmup,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="cosine (to a tenth) or constant.")] = _SAID.schedule,
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Of AdamW.")] = _SAID.weight_decay,
    clip: Annotated[float, typer.Option(metavar="X", help="Longest gradient.")] = _SAID.clip,
    ema: Annotated[
        float, typer.Option(metavar="X", help="Decay of a moving average of the weights; 0: none.")
    ] = _SAID.ema,
    precision: Annotated[str, typer.Option(metavar="NAME", help="bf16 (autocast) or no (float32).")] = _SAID.precision,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Draft the N most frequent tokens only; 0: all; unsaid: those of --from, or {DRAFT_VOCAB}.",
        ),
    ] = _SAID.draft_vocab,
    save_minutes: Annotated[float, typer.Option(metavar="M", help="Between checkpoints.")] = _SAID.save_minutes,
    measure_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between measurements; 0: at the end only.")
    ] = _SAID.measure_every,
    measure_prompts: Annotated[
        int, typer.Option(metavar="N", help="Prompts held back for measuring.")
    ] = _SAID.measure_prompts,
    measure_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens decoded for each.")] = _SAID.measure_tokens,
    patience: Annotated[
        int, typer.Option(metavar="K", help="Stop after K measurements without a new best; 0: never.")
    ] = _SAID.patience,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights, order and draws.")] = _SAID.seed,
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
    ] = _SAID.begin,
    features: Annotated[
        str, typer.Option(metavar="NAME", help="The target's states: cache, stream, or auto (what fits is cached).")
    ] = _SAID.features,
    cache_gib: Annotated[float, typer.Option(metavar="X", help="Most disk that cached states take.")] = _SAID.cache_gib,
) -> None:
    """Train a speculator on a model's own answers; stopped at any moment, the same command goes on.

    foretell data generate --self --tokens 300000 --out answers

    foretell train eagle3 --data answers --out my-eagle3

    foretell generate "Why is the sky blue?" --method eagle3 --draft-model my-eagle3
    """
    settings = _settings(
        recipe=recipe, model=model, data=tuple(_portion(d) for d in data), out=str(out), steps=steps, epochs=epochs,
        batch_tokens=batch_tokens, sequence=sequence, accumulate=accumulate, lr=lr, warmup=warmup, schedule=schedule,
        weight_decay=weight_decay, clip=clip, ema=ema, precision=precision, draft_vocab=draft_vocab,
        save_minutes=save_minutes,
        measure_every=measure_every, measure_prompts=measure_prompts, measure_tokens=measure_tokens, patience=patience,
        seed=seed,
        options=dict(_pair(c) for c in chosen or ()), begin=begin, features=features, cache_gib=cache_gib,
    )  # fmt: skip
    run(settings, shlex.join(["foretell", *sys.argv[1:]]))


def run(settings: Settings, command: str) -> None:
    """Train, and write weights, curve and card.

    Raises:
        ValueError: anything that the settings, the data, the model or the machine do not allow.
    """
    kind = understood(settings)
    on = _accelerator()
    quiet = not on.is_main_process
    model = load(settings.model, "bfloat16" if settings.precision == "bf16" else "float32", str(on.device))
    task = prepare(settings, model, kind)
    states = features(task)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    watcher = _watcher(quiet)
    with Interrupt() as interrupt, watcher if isinstance(watcher, Bar) else _Nothing():
        trainer = Trainer(task, on, states, watcher)
        trainer.run(lambda: interrupt.requested)
    if not quiet:
        curve.write(trainer.out, trainer.rows, picture=True)
        card.write(trainer, command)
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


def _settings(**values: object) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        key, _, message = explain(error).partition(": ")
        raise ValueError(f"{flag(key)}: {message}") from error


def _portion(text: str) -> Portion:
    folder, _, weight = text.rpartition("=")
    if not folder:
        return Portion(folder=text, weight=1.0)
    try:
        return Portion(folder=folder, weight=float(weight))
    except ValueError as error:
        raise ValueError(f"--data {text}: after = stands how often an epoch shows each text, as answers=0.5") from error


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {text}: write KEY=VALUE, as inner=1024")
    return key, value


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return


def _watcher(quiet: bool) -> Watcher:
    if quiet:
        return Watcher()
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines(console)


class Lines(Watcher):
    """A line every half minute, and one for every measurement and checkpoint: for logs."""

    def __init__(self, console: Console) -> None:
        self._console, self._told, self._steps, self._best = console, 0.0, 0, ""
        self._first: tuple[float, int, int] = (time.monotonic(), 0, 0)

    def begun(self, step: int, steps: int, processes: int) -> None:
        """Training starts."""
        self._steps = steps
        self._say(f"step {step:,} of {steps:,}" + (f", {processes} processes" if processes > 1 else ""))

    def stepped(self, row: Row) -> None:
        """A step is done."""
        now = time.monotonic()
        if self._first[1] == 0:
            self._first = now, row.step, row.tokens
        elif now - self._told >= PROGRESS_INTERVAL or row.step == self._steps or row.tokens_per_pass is not None:
            self._told = now
            self._say(f"step {row.step:,} of {self._steps:,}  loss {row.loss:.4f}  {self._speed(row, now)}{self._best}")

    def _speed(self, row: Row, now: float) -> str:
        began, step, tokens = self._first
        rate = (now - began) / max(row.step - step, 1)
        left = rate * (self._steps - row.step)
        return f"{(row.tokens - tokens) / max(now - began, 1e-9):,.0f} tokens/s  {left / 60:,.0f} min left"

    def measured(self, found: Measured, best: float) -> None:
        """Tokens per pass were measured."""
        self._best = f"  {found.tokens_per_pass:.3f} tokens/pass (best {best:.3f})"

    def saved(self, step: int) -> None:
        """A checkpoint was written."""
        self._say(f"checkpoint of step {step:,}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class Bar(Watcher):
    """A live bar for terminals."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"), BarColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn()
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, speed_estimate_period=600)
        self._task = self._bar.add_task("", total=1, text="")
        self._gain, self._before = "", (0.0, 0)

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begun(self, step: int, steps: int, processes: int) -> None:
        """Training starts."""
        self._bar.update(self._task, completed=step, total=steps)

    def stepped(self, row: Row) -> None:
        """A step is done."""
        seconds, tokens = self._before
        speed = (row.tokens - tokens) / max(row.seconds - seconds, 1e-9)
        self._before = row.seconds, row.tokens
        self._bar.update(self._task, completed=row.step, text=f"loss {row.loss:.4f}  {speed:,.0f} tokens/s{self._gain}")

    def measured(self, found: Measured, best: float) -> None:
        """Tokens per pass were measured."""
        self._gain = f"  {found.tokens_per_pass:.3f} tokens/pass (best {best:.3f})"
