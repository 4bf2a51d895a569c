"""`foretell train sparsity`: fit predictors of the neurons that a token needs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.sparsity import fingerprint, open_source, read_calibration_text, save_with_price
from foretell.model.sparsity_file import SparsityFile
from foretell.sparsify.predictors import PredictorSettings, fit_predictors, save_predictors

_DEFAULTS = PredictorSettings()


def sparsity(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a directory, a .gguf file, or a hub id.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    share: Annotated[
        float, typer.Option("--sparsity", metavar="SHARE", help="Share of the neurons that a token does not read.")
    ] = _DEFAULTS.sparsity,
    rank: Annotated[int, typer.Option(metavar="N", help="Rank of the predictors.")] = _DEFAULTS.rank,
    steps: Annotated[
        int, typer.Option(metavar="N", min=0, help="Gradient steps per layer after the closed form; 0: none.")
    ] = _DEFAULTS.steps,
    lr: Annotated[float, typer.Option(metavar="X", min=0, help="Learning rate of these steps.")] = _DEFAULTS.rate,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Text to fit on and to compare on; repeatable. Default: the model writes it."
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to fit on.")] = 8192,
    held_back_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the comparison.")] = 2048,
    dtype: options.Dtype = "auto",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of text and batches.")] = _DEFAULTS.seed,
) -> None:
    """Fit a predictor per layer of the neurons that a token needs (Deja Vu), and measure what that costs. Lossy as a
    target, lossless as a draft of the dense model.

    foretell train sparsity smollm2-135m --sparsity 0.5 --out predicted

    foretell generate "Why is the sky blue?" --sparsity predicted
    """
    settings = PredictorSettings(share, rank, steps, lr, seed=seed)
    console, source = Console(stderr=True), open_source(model, "made sparse")
    found = read_calibration_text(source, text, calibration_tokens, held_back_tokens, seed, console)
    with console.status("fitting") as status:
        fitted = fit_predictors(source.config, source.weights, found.calibration, settings, status.update)
    save_predictors(out, [each.rule for each in fitted])
    file = SparsityFile(
        method="deja_vu", model=fingerprint(source), layers=source.config.layers, sparsity=share,
        thresholds=tuple((each.rule.threshold,) for each in fitted), text=found.origin,
        tokens=found.calibration.numel(), recall=tuple(each.recall for each in fitted),
        recall_ahead=tuple(each.ahead for each in fitted if each.ahead is not None),
        recall_of_fixed_set=tuple(each.chance for each in fitted),
    )  # fmt: skip
    save_with_price(file, out, model, dtype, found, console)
