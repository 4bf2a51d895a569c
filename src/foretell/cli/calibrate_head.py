"""`foretell calibrate head`: a draft head that scores all tokens through a low rank, and the best again exactly."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import data, options
from foretell.compress.draft_head import BEST, draft_head_network, fit_draft_head, weights_read
from foretell.load import load
from foretell.speculator.checkpoint import save
from foretell.train.data.dataset import Dataset
from foretell.train.loop.job import check_data
from foretell.train.loop.model_card import CARD


def head(
    speculator: Annotated[
        str, typer.Argument(metavar="SPECULATOR", help="Directory of an EAGLE, or eagle3: the one that is installed.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the speculator to.")],
    rank: Annotated[int, typer.Option(metavar="R", min=1, help="Rank through which all tokens are scored.")] = 128,
    candidates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that are scored exactly then, or a few more.")
    ] = 64,
    model: options.Model = options.DEFAULT_MODEL,
    data_folder: Annotated[
        Path | None,
        typer.Option("--data", metavar="SET", help="Data set with the model's answers. Default: it writes one in DIR."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the data set to fit on and to compare on.")] = 6000,
    dtype: options.Dtype = "auto",
) -> None:
    """Let an EAGLE draft with a head in two stages, which reads a quarter of the weights or less.

    foretell calibrate head eagle3 --data answers --out faster

    foretell generate "Why is the sky blue?" --method eagle3 --draft-model faster
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not an empty folder; name another --out")
    console, target = Console(stderr=True), load(model, dtype)
    network = draft_head_network(target.speculator(speculator), rank, candidates)
    if data_folder is None:
        data_folder = out / "calibration-data"
        data.generate(out=data_folder, tokens=tokens, model=model, own=True, dtype=dtype)
    dataset = Dataset.open(data_folder)
    check_data(dataset, target)
    with console.status("reading the data set"):
        found = fit_draft_head(target.network, network, list(dataset), tokens, rank, candidates)
    save(out, network, network.config)
    if Path(speculator, CARD).is_file():
        shutil.copyfile(Path(speculator, CARD), out / CARD)
    own, whole = weights_read(network)
    typer.echo(
        f"{own / 1e6:.2f} M of {whole / 1e6:.2f} M weights of the head are read for a token ({own / whole:.0%})\n"
        f"on {found.states} states that it was not fitted on: {found.best:.1%} have the same most probable token, and "
        f"{found.best_few:.1%} of the {BEST} most probable ones are the same\n{out}"
    )
