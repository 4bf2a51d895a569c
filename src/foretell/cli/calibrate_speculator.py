"""`foretell calibrate temperature`, and how a trained speculator is fitted to its own states."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.api import Model
from foretell.cli import data, options
from foretell.cli.setup import load_model
from foretell.speculator.checkpoint import save
from foretell.speculator.network.base import Speculator
from foretell.train.data.dataset import Dataset, Document
from foretell.train.draft_temperature import fit_temperature, temperature_network
from foretell.train.loop.job import check_data
from foretell.train.loop.model_card import CARD
from foretell.utils.paths import require_empty

Fitted = Annotated[
    str, typer.Argument(metavar="SPECULATOR", help="Directory of a speculator, or the kind of an installed one.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the speculator to.")]
DataSet = Annotated[
    Path | None,
    typer.Option("--data", metavar="SET", help="Data set with the model's answers. Default: it writes one in DIR."),
]
_DATA = "calibration-data"
"""Data set that is written in the folder of the speculator where none is named."""
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of the data set to fit on and to compare on.")]


def temperature(
    speculator: Fitted,
    out: Out,
    model: options.Model = options.DEFAULT_MODEL,
    data_folder: DataSet = None,
    tokens: Tokens = 6000,
    dtype: options.Dtype = "auto",
) -> None:
    """Let a draft_model or eagle3 be as sure of its tokens as they are right, for better trees; costs nothing.

    foretell calibrate temperature draft_model --data answers --out calibrated

    foretell generate "Why is the sky blue?" --method dynamic_tree --draft-model calibrated
    """

    def fit(target: Model, loaded: Speculator, documents: list[Document]) -> str:
        fitted = fit_temperature(target.network, temperature_network(loaded), documents, tokens)
        before, after = fitted.before, fitted.after
        return (
            f"temperature {fitted.temperature:.3f}\n"
            f"on {fitted.states} states that it was not fitted on: the most probable token is right in "
            f"{before.right:.1%}; its mean probability was {before.confidence:.1%} and is {after.confidence:.1%}; "
            f"the loss was {before.loss:.3f} and is {after.loss:.3f} nats"
        )

    fit_speculator(speculator, out, model, data_folder, tokens, dtype, fit)


def fit_speculator(
    speculator: str,
    out: Path,
    model: str,
    data_folder: Path | None,
    tokens: int,
    dtype: str,
    fit: Callable[[Model, Speculator, list[Document]], str],
) -> None:
    """Load a speculator, let `fit` change it and say what it found, and write it with its card."""
    require_empty(out, besides=_DATA if data_folder is None else "")
    console, target = Console(stderr=True), load_model(model, dtype)
    network = target.speculator(speculator)
    if data_folder is None:
        data_folder = out / _DATA
        data.generate(out=data_folder, tokens=tokens, model=model, own=True, dtype=dtype)
    dataset = Dataset.open(data_folder)
    check_data(dataset, target)
    with console.status("reading the data set"):
        summary = fit(target, network, list(dataset))
    save(out, network, network.config)
    if Path(speculator, CARD).is_file():
        shutil.copyfile(Path(speculator, CARD), out / CARD)
    typer.echo(f"{summary}\n{out}")
