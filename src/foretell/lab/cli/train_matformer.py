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
    check_output,
    format_comparison,
)
from foretell.lab.cli.sparsity import open_source, read_calibration_text
from foretell.lab.sparsify.nested import NestedSettings, write_nested

_DEFAULTS = NestedSettings()


@options.with_settings(_DEFAULTS)
def matformer(
    ctx: typer.Context,
    model: options.SourceModel,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors to write.")],
    shares: Annotated[
        str, typer.Option(metavar="LIST", help="Sizes that are trained together, as shares of all neurons.")
    ] = ",".join(f"{s:g}" for s in _DEFAULTS.shares),
    settings: options.Settings = options.NO_SETTINGS,
    text: Text = None,
    calibration_tokens: CalibrationTokens = 4096,
    held_back_tokens: HeldBackTokens = 2048,
    force: Force = False,
) -> None:
    """Write a model with nested feed-forward networks (MatFormer). Its first neurons draft for all of them:

    foretell train matformer smollm2-135m --out nested

    foretell generate "Why is the sky blue?" --model nested --method matformer_draft
    """
    refuse_unused(ctx, ("rate",), "--steps 0 only orders neurons", not settings["steps"])
    console = Console(file=sys.stderr)
    check_output(out, force)
    asked = NestedSettings(_parse_shares(shares), **settings)
    source = open_source(model, "nested")
    calibration_text = read_calibration_text(source, text, calibration_tokens, held_back_tokens, asked.seed, console)
    with console.status("reading activations") as status:
        size = write_nested(
            source, calibration_text.calibration, asked, out,
            lambda done: status.update(f"{done} of {source.config.layers} blocks"),
        )  # fmt: skip
    compared = source.compare_with(out, calibration_text.held_back)
    trained = f", {asked.steps} steps per layer" if asked.steps else ""
    typer.echo(
        f"{out}: {size} of {source.config.ffn} neurons per layer, ordered{trained}; compared with the source on "
        f"{compared.tokens:,} positions held back:\n{format_comparison(compared)}"
    )


def _parse_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--shares: numbers with commas between were expected, found {text!r}") from None
