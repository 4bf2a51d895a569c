"""`foretell calibrate head`: a draft head in two stages."""

from typing import Annotated

import typer

from foretell.api import Model
from foretell.cli import options
from foretell.cli.calibrate_speculator import DataSet, Fitted, Out, Tokens, fit_speculator
from foretell.lab.compress.draft_head import BEST, draft_head_network, fit_draft_head, weights_read
from foretell.speculator.network.base import Speculator
from foretell.train.data.dataset import Document


def head(
    speculator: Fitted,
    out: Out,
    rank: Annotated[int, typer.Option(metavar="R", min=1, help="Rank through which all tokens are scored.")] = 128,
    candidates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that are scored exactly then, or a few more.")
    ] = 64,
    model: options.Model = options.DEFAULT_MODEL,
    data_folder: DataSet = None,
    tokens: Tokens = 6000,
    dtype: options.Dtype = "auto",
) -> None:
    """Let an EAGLE draft with a head in two stages, which reads a quarter of the weights or less.

    foretell calibrate head eagle3 --data answers --out faster

    foretell generate "Why is the sky blue?" --method eagle3 --draft-model faster
    """

    def fit(target: Model, loaded: Speculator, documents: list[Document]) -> str:
        network = draft_head_network(loaded, rank, candidates)
        fitted = fit_draft_head(target.network, network, documents, tokens, rank, candidates)
        own, whole = weights_read(network)
        return (
            f"{own / 1e6:.2f} M of {whole / 1e6:.2f} M weights of the head are read for a token ({own / whole:.0%})\n"
            f"on {fitted.states} states that it was not fitted on: {fitted.best:.1%} have the same most probable "
            f"token, and {fitted.best_few:.1%} of the {BEST} most probable ones are the same"
        )

    fit_speculator(speculator, out, model, data_folder, tokens, dtype, fit)
