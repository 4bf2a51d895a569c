"""`foretell nat`: sequence-to-sequence models that do not decode from left to right."""

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.interrupt import Interrupt
from foretell.cli.progress import PROGRESS_INTERVAL, TimeLeft
from foretell.lab.nat.checkpoint import load_model, require_autoregressive, require_same_words
from foretell.lab.nat.decode import DecodeOptions, options_read, translate
from foretell.lab.nat.distill import distilled
from foretell.lab.nat.evaluate import NatReport, evaluate
from foretell.lab.nat.lossless import translate_verified
from foretell.lab.nat.network import NatModel
from foretell.lab.nat.number_words import MAX_DIGITS, generate_pairs
from foretell.lab.nat.objective import KINDS
from foretell.lab.nat.pairs import read_pairs, write_pairs
from foretell.lab.nat.train import NatSettings, NatTrainer, write_card
from foretell.train.loop.curve import StepMetrics
from foretell.utils.paths import require_file_place
from foretell.utils.validation import validate

app = options.group("Train and run sequence-to-sequence models that do not decode from left to right.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `foretell nat train`.")]
Drafter = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Non-autoregressive model that drafts for DIR, which is autoregressive: lossless."
    ),
]
Teacher = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Autoregressive model that chooses among --fertility-samples.")
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of random numbers.")]


@app.command()
def data(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Tab-separated file to write: source, reference, …")],
    task: Annotated[str, typer.Option(metavar="NAME", help="number_to_words or words_to_number.")] = "number_to_words",
    pairs: Annotated[int, typer.Option(metavar="N", min=1, help="Pairs to write.")] = 20_000,
    digits: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_DIGITS, help="Most digits of a number.")] = 6,
    all_references: Annotated[
        bool, typer.Option("--all-references", help="Every spelling of a number, for evaluation; else one at random.")
    ] = False,
    teacher: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Replace the references by this model's outputs (distillation)."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Distil the pairs of this file, not new ones.")
    ] = None,
    exclude: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw no source of this file: for held-out pairs.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Write pairs of a built-in task, or distil pairs with an autoregressive teacher.

    foretell nat data --pairs 40000 --out train.tsv

    foretell nat data --from train.tsv --teacher ar --out distilled.tsv
    """
    require_file_place(out)
    if source is not None and teacher is None:
        raise ValueError("--from names pairs to distil, so it needs --teacher DIR")
    if source is not None:
        refuse_unused(
            ctx, ("task", "pairs", "digits", "all_references", "exclude", "seed"), "--from names the pairs to distil"
        )
    if teacher is not None:
        refuse_unused(ctx, ("all_references",), "--teacher replaces the references of a source by one")
    if source is None:
        known = set() if exclude is None else {p.source for p in read_pairs(exclude)}
        text_pairs = list(generate_pairs(task, pairs, seed, digits, all_references, known))
    else:
        text_pairs = read_pairs(source)
    if teacher is not None:
        text_pairs = list(distilled(text_pairs, require_autoregressive(load_model(teacher), teacher, "teacher")))
    write_pairs(out, text_pairs)
    typer.echo(f"{out}: {len(text_pairs):,} pairs", err=True)


@app.command()
@options.with_settings(NatSettings.model_construct(kind="cmlm", data="", out=""))
def train(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}.")],
    data: Annotated[Path, typer.Option(metavar="FILE", help="Pairs: source, tab, reference.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the model; training resumes from a checkpoint in it.")
    ],
    settings: options.Settings = options.NO_SETTINGS,
) -> None:
    """Train a model of a kind; the same command resumes an interrupted training.

    foretell nat train autoregressive --data train.tsv --minutes 3 --out ar

    foretell nat train cmlm --data distilled.tsv --minutes 3 --out cmlm
    """
    given = validate(NatSettings, {"kind": kind, "data": str(data), "out": str(out), **settings})
    with Interrupt() as interrupt:
        trainer = NatTrainer(given, _Log(Console(stderr=True)))
        trainer.run(lambda: interrupt.requested)
    write_card(trainer, shlex.join(["foretell", *sys.argv[1:]]))
    last = trainer.curve[-1]
    typer.echo(f"{out}: {last.step:,} steps, {last.seconds / 60:.1f} min of CPU time, loss {last.loss:.4f}", err=True)


class _Log:
    """Prints a line at the first step and every half minute."""

    def __init__(self, console: Console) -> None:
        self._console, self._last, self._left = console, 0.0, TimeLeft()

    def __call__(self, row: StepMetrics, share: float) -> None:
        left = self._left(share)
        if time.monotonic() - self._last >= PROGRESS_INTERVAL:
            self._last = time.monotonic()
            self._console.print(
                f"step {row.step:,}  loss {row.loss:.4f}  {row.seconds / 60:.1f} min of CPU time  {left}".rstrip(),
                highlight=False,
            )


def _load(
    folder: Path, drafter: Path | None, teacher: Path | None
) -> tuple[NatModel, NatModel | None, NatModel | None]:
    """The model, its drafter and the teacher, checked to fit together."""
    model = load_model(folder)
    draft, chooser = (None if path is None else load_model(path) for path in (drafter, teacher))
    if drafter is not None and draft is not None:
        require_same_words(model, draft, drafter)
        require_autoregressive(model, folder, "model that a --drafter drafts for")
        if draft.config.kind == "autoregressive":
            raise ValueError(f"{drafter}: this model decodes from left to right itself; a drafter is of another kind")
    if teacher is not None and chooser is not None:
        require_same_words(model, chooser, teacher)
        require_autoregressive(chooser, teacher, "teacher")
    return model, draft, chooser


@app.command("translate")
@options.with_settings(DecodeOptions())
def translate_command(
    ctx: typer.Context,
    folder: Folder,
    source: Annotated[
        list[str] | None, typer.Argument(metavar="SOURCE", help="Sources; none: lines of standard input.")
    ] = None,
    drafter: Drafter = None,
    teacher: Teacher = None,
    settings: options.Settings = options.NO_SETTINGS,
    as_json: options.Json = False,
) -> None:
    """Translate sources, one line each.

    foretell nat translate cmlm "1 9 8 4"

    foretell nat translate ar "1 9 8 4" --drafter cmlm --json
    """
    model, draft, chooser = _load(folder, drafter, teacher)
    _refuse_unused(ctx, model if draft is None else draft, drafts=draft is not None)
    given = validate(DecodeOptions, settings, "options of decoding")
    for text in source or (line.strip() for line in sys.stdin):
        tokens = model.config.source.encode(text)
        if not tokens:
            raise ValueError('a source has no words; write words with spaces between them, as "1 9 8 4"')
        if unknown := model.config.source.unknown_words(text):
            typer.echo(f"unknown to {folder}, so read as <unk>: {', '.join(unknown)}", err=True)
        if draft is None:
            plain = translate(model, [tokens], given, chooser)
            out, passes, draft_passes = plain.tokens[0], plain.passes, 0
        else:
            verified = translate_verified(model, draft, tokens, given)
            out, passes, draft_passes = verified.tokens, verified.passes, verified.draft_passes
        written = model.config.target.decode(out)
        record = {"source": text, "target": written, "passes": passes, "draft_passes": draft_passes}
        typer.echo(json.dumps(record) if as_json else written)


@app.command("evaluate")
@options.with_settings(DecodeOptions())
def evaluate_command(
    ctx: typer.Context,
    folder: Folder,
    data: Annotated[Path, typer.Option(metavar="FILE", help="Pairs with one reference or several.")],
    drafter: Drafter = None,
    teacher: Teacher = None,
    settings: options.Settings = options.NO_SETTINGS,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sources that are decoded together.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Measure quality, passes and speed on held-out pairs.

    foretell nat evaluate cmlm --data test.tsv --iterations 4

    foretell nat evaluate ar --data test.tsv --drafter cmlm
    """
    model, draft, chooser = _load(folder, drafter, teacher)
    _refuse_unused(ctx, model if draft is None else draft, drafts=draft is not None)
    given = validate(DecodeOptions, settings, "options of decoding")
    report = evaluate(model, read_pairs(data), given, batch, chooser, draft)
    if as_json:
        typer.echo(json.dumps({"model": str(folder), "kind": model.config.kind, **asdict(report)}, indent=1))
    else:
        Console().print(_table(report, batch))


def _refuse_unused(ctx: typer.Context, model: NatModel, drafts: bool) -> None:
    """Refuse options of decoding that this model does not read when it translates, or drafts.

    Raises:
        ValueError: one was given.
    """
    kind, does = model.config.kind, "drafts" if drafts else "decodes"
    unread = DecodeOptions.model_fields.keys() - options_read(kind, drafts)
    if "fertility_samples" in unread:
        unread |= {"teacher"}
    refuse_unused(ctx, unread, f"a model of the kind {kind} {does} here, which does not read that")
    if ctx.params["fertility_samples"] == 1:
        refuse_unused(ctx, ("teacher",), "it chooses among several --fertility-samples, and there is one")


def _table(report: NatReport, batch: int) -> Table:
    of = "per source" if batch == 1 else f"per batch of {batch} sources"
    table = Table(box=None, show_header=False)
    rows = {
        "pairs": f"{report.pairs:,}",
        "exact match": f"{report.exact_match:.1%}",
        "BLEU": "sacrebleu is not installed" if report.bleu is None else f"{report.bleu:.1f}",
        "edit distance, per word of the reference": f"{report.edit_distance:.4f}",
        f"decoder passes {of}": f"{report.passes:.2f}",
        "tokens per pass": f"{report.tokens_per_pass:.2f}",
        "tokens per second": f"{report.tokens_per_second:,.0f}",
        f"milliseconds {of}": f"{report.milliseconds:.2f}",
    }
    if report.same_as_verifier is not None:
        rows[f"passes of the drafter {of}"] = f"{report.draft_passes:.2f}"
        rows["same as greedy decoding"] = f"{report.same_as_verifier:.1%}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table
