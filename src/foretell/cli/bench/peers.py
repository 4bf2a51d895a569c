"""`foretell bench peers`: other runtimes in virtual environments of their own."""

from typing import Annotated

import typer

from foretell.bench.peers import isolated
from foretell.cli.setup import spinner


def install(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Runtimes: xllamacpp, openvino, onnxruntime, vllm (default: all)."),
    ] = None,
) -> None:
    """Install other runtimes for `foretell bench run --peers`, each in a virtual environment of its own."""
    for name in names or isolated.RUNTIMES:
        with spinner(f"installing {name}"):
            isolated.install(name)
        typer.echo(f"{name}: {isolated.folder() / name}")
