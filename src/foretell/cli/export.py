"""`foretell export`: write a trained speculator for other engines."""

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options
from foretell.cli.setup import spinner
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.speculator.export import export as write
from foretell.speculator.export import find_exports
from foretell.speculator.formats.base import Verifier
from foretell.utils.paths import require_empty

app = typer.Typer(pretty_exceptions_enable=False)
_ON_THE_HUB = {DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}


@app.command()
def export(
    speculator: Annotated[str, typer.Argument(help="Directory of a speculator, or the kind of an installed one.")],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="speculators, eagle3, eagle, dflash, vllm-medusa, vllm-mlp, redrafter or hf.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write, new or empty.")],
    model: options.Model = options.DEFAULT_MODEL,
    verifier: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What readers shall call the target. [default: its hub id or --model]"),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Write a trained speculator as vLLM, SGLang and the speculators library read it.

    speculators is for EAGLE-3 and P-EAGLE, eagle3 for EAGLE-3, eagle for EAGLE-1 and 2, hf for draft models and PARD;
    see docs/formats.md.
    """
    find_exports(format_name)
    require_empty(out)
    with spinner(f"loading {model}"):
        target = load(model, dtype)
        network = target.speculator(speculator)
    write(network, Verifier(verifier or _ON_THE_HUB.get(model, model), target.config, target.codec), format_name, out)
    typer.echo(f"{out}: {network.kind} speculator in the format {format_name}")
