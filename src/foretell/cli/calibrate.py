"""`foretell calibrate`: thresholds, placements of neurons and temperatures, from data."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.commands import add_group_commands
from foretell.cli.data import open_or_generate
from foretell.cli.given import refuse_unused
from foretell.cli.setup import load_model
from foretell.speculator.checkpoint import save
from foretell.speculator.network.exits import Exits
from foretell.train.draft_temperature import fit_temperature, temperature_network
from foretell.train.exits.calibrate import CalibrationSettings, calibrate
from foretell.train.loop.model_card import CARD
from foretell.utils.paths import require_empty, require_file_place

app = options.group("Choose thresholds, placements and temperatures from data.")
add_group_commands(app, "calibrate")
_SEED = 1_000_003
"""Seed of the answers that are generated: other ones than those that exits are fitted on."""
_DATA = "calibration-data"
"""Data set that is written in the folder of the exits, or of the speculator, where none is named."""


@app.command()
def temperature(
    speculator: Annotated[
        str, typer.Argument(metavar="SPECULATOR", help="Directory of a speculator, or the kind of an installed one.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the speculator to.")],
    model: options.Model = options.DEFAULT_MODEL,
    data_folder: options.AnswersSet = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the data set to fit on and to compare on.")] = 6000,
    dtype: options.Dtype = "auto",
) -> None:
    """Let a draft_model or eagle3 be as sure of its tokens as they are right, for better trees; costs nothing.

    foretell calibrate temperature draft_model --data answers --out calibrated

    foretell generate "Why is the sky blue?" --method dynamic_tree --draft-model calibrated
    """
    require_empty(out, *((_DATA,) if data_folder is None else ()))
    console, target = Console(stderr=True), load_model(model, dtype)
    network = temperature_network(target.speculator(speculator))
    dataset = open_or_generate(data_folder, out / _DATA, target, tokens=tokens, model=model, dtype=dtype)
    with console.status("reading the data set"):
        fitted = fit_temperature(target.network, network, list(dataset), tokens)
    save(out, network, network.config)
    if (card := Path(speculator, CARD)).is_file():
        shutil.copyfile(card, out / CARD)
    before, after = fitted.before, fitted.after
    typer.echo(
        f"temperature {fitted.temperature:.3f}\n"
        f"on {fitted.states} states that it was not fitted on: the most probable token is right in "
        f"{before.right:.1%}; its mean probability was {before.confidence:.1%} and is {after.confidence:.1%}; "
        f"the loss was {before.loss:.3f} and is {after.loss:.3f} nats\n{out}"
    )


@app.command()
@options.with_settings(CalibrationSettings())
def exits(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Exits of `foretell train exits`.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. Default: calibration.json in DIR.")
    ] = None,
    settings: options.Settings = options.NO_SETTINGS,
    model: options.Model = options.DEFAULT_MODEL,
    data_folder: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="SET",
            help="Data set with the model's greedy answers, not those of the fit. Default: it writes one in DIR.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to write, without --data.")] = 20_000,
    curve: Annotated[
        bool, typer.Option("--curve", help="Also print what changes and how many layers run at every level of caution.")
    ] = False,
    dtype: options.Dtype = "auto",
) -> None:
    """Choose exits and thresholds so that the share of changed tokens is bounded, for early_exit_lossy.

    foretell calibrate exits exits --disagreement 0.05 --confidence 0.95

    foretell generate "Why is the sky blue?" --method early_exit_lossy --draft-model exits --speculative-config
    '{"calibration": "exits/calibration.json"}'
    """
    refuse_unused(ctx, ("tokens",), "--data names the answers", data_folder is not None)
    asked = CalibrationSettings(**settings)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory; give exits of `foretell train exits`")
    require_file_place(out or folder / "calibration.json")
    console, target = Console(stderr=True), load_model(model, dtype)
    network = target.speculator(folder)
    if not isinstance(network, Exits):
        raise ValueError(f"{folder}: a speculator of kind {network.kind}; give exits of `foretell train exits`")
    dataset = open_or_generate(
        data_folder, folder / _DATA, target, tokens=tokens, model=model, dtype=dtype, greedy_share=1.0, seed=_SEED,
        max_answer=asked.longest,
    )  # fmt: skip
    with console.status("reading the data set") as status:
        result = calibrate(target, network, dataset, asked, status.update)
    c, file = result.calibration, out or folder / "calibration.json"
    c.save(file)
    what = "tokens change" if asked.loss == "tokens" else "answers change"
    typer.echo(
        f"exits after {', '.join(map(str, c.layers))} of {target.config.layers} layers, thresholds "
        f"{', '.join(f'{t:.4f}' for t in c.thresholds)} ({asked.measure})\n"
        f"at most {asked.disagreement:.1%} of {what}, at a confidence of {asked.confidence:.0%}: {c.mean_loss:.2%} of "
        f"those of {c.answers} answers; {c.depth:.1%} of the layers run\n"
        f"on {result.check_answers} fresh answers: {result.check_loss:.2%} change; {result.check_depth:.1%} of the "
        f"layers run\n{file}"
    )
    if curve:
        rows = [f"| {level:g} | {loss:.2%} | {depth:.1%} |" for level, loss, depth in result.curve]
        typer.echo("\n".join([f"\n| agreement of those that leave | {what} | layers run |", "|---:|---:|---:|", *rows]))
