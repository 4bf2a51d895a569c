"""`foretell calibrate sparsity`: thresholds below which neurons are not read."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.lab.cli.quantize import CalibrationTokens, HeldBackTokens, Text, TextSeed
from foretell.lab.cli.sparsity import fingerprint, open_source, read_calibration_text, save_with_comparison
from foretell.lab.sparsify.nested import mix_sizes
from foretell.lab.sparsify.thresholds import THRESHOLD_METHODS, calibrate_thresholds, check_share
from foretell.model.offload.sparsity_file import SparsityFile
from foretell.utils.names import unknown
from foretell.utils.paths import require_empty


def sparsity(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="cats: thresholds on the activated gates of neurons; teal: on the inputs of every matrix; "
            "matformer: how many first neurons each layer has.",
        ),
    ] = "cats",
    share: Annotated[
        float,
        typer.Option("--sparsity", metavar="SHARE", help="Share of neurons, or inputs, that a token does not read."),
    ] = 0.5,
    text: Text = None,
    calibration_tokens: CalibrationTokens = 4096,
    held_back_tokens: HeldBackTokens = 2048,
    dtype: options.Dtype = "auto",
    seed: TextSeed = 0,
) -> None:
    """Choose thresholds below which neurons are not read, and measure what that costs. Lossy as a target, lossless as
    a draft of the dense model.

    foretell calibrate sparsity smollm2-135m --sparsity 0.5 --out half

    foretell generate "Why is the sky blue?" --sparsity half
    """
    refuse_unused(ctx, ("seed",), "--text names the text", bool(text))
    methods = (*THRESHOLD_METHODS, "matformer")
    if method not in methods:
        raise unknown("method", method, methods)
    check_share(share)
    require_empty(out)
    console, source = Console(stderr=True), open_source(model, "calibrated")
    calibration_text = read_calibration_text(source, text, calibration_tokens, held_back_tokens, seed, console)
    config = source.config
    thresholds: tuple[tuple[float, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    with console.status("reading activations") as status:
        inputs = config, source.weights, calibration_text.calibration

        def report(done: int) -> None:
            status.update(f"{done} of {config.layers} blocks")

        if method == "matformer":
            sizes = mix_sizes(*inputs, share, report)
        else:
            thresholds = calibrate_thresholds(*inputs, method, share, report)
    file = SparsityFile(
        method=method, model=fingerprint(source), layers=config.layers, sparsity=share, thresholds=thresholds,
        sizes=sizes, text=calibration_text.origin, tokens=calibration_text.calibration.numel(),
    )  # fmt: skip
    save_with_comparison(file, out, model, dtype, calibration_text, console)
