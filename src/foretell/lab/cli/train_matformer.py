"""`foretell train matformer`: order the neurons of a model so that every prefix of them is a network of its own."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.lab.cli.quantize import (
    CalibrationTokens,
    Force,
    HeldBackTokens,
    Text,
    TextSeed,
    check_output,
    format_comparison,
)
from foretell.lab.cli.sparsity import open_source, read_calibration_text
from foretell.lab.quantize.directory import written_config
from foretell.lab.sparsify.nested import write_nested


def matformer(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors to write.")],
    extract: Annotated[
        float, typer.Option(metavar="SHARE", help="Write this share of the neurons only, as a smaller model.")
    ] = 1.0,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Keep the order: the model was trained with nested widths.")
    ] = False,
    text: Text = None,
    calibration_tokens: CalibrationTokens = 4096,
    held_back_tokens: HeldBackTokens = 2048,
    seed: TextSeed = 0,
    force: Force = False,
) -> None:
    """Write a model with nested feed-forward networks (MatFormer). Its first neurons draft for all of them:

    foretell train matformer smollm2-135m --out nested

    foretell generate "Why is the sky blue?" --model nested --method matformer_draft
    """
    refuse_unused(ctx, ("seed",), "--text names the text", text is not None)
    if not 0 < extract <= 1:
        raise ValueError(f"--extract {extract:g}: a share of the neurons above 0 and at most 1 was expected")
    console = Console(file=sys.stderr)
    check_output(out, force)
    source = open_source(model, "nested")
    written_config(source.folder, source.config)
    calibration_text = read_calibration_text(source, text, calibration_tokens, held_back_tokens, seed, console)
    with console.status("reading activations") as status:
        size = write_nested(
            source, None if ordered else calibration_text.calibration, extract, out,
            lambda done: status.update(f"{done} of {source.config.layers} blocks"),
        )  # fmt: skip
    compared = source.compare_with(out, calibration_text.held_back)
    typer.echo(
        f"{out}: {size} of {source.config.ffn} neurons per layer, ordered; compared with the source on "
        f"{compared.tokens:,} positions held back:\n{format_comparison(compared)}"
    )
