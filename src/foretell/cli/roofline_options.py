"""Options, tables and checks that the commands of `foretell roofline` share."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foretell.cli.errors import print_error
from foretell.roofline import records, report
from foretell.roofline.workload import STAGES

ModelName = Annotated[
    str,
    typer.Argument(help="Built-in name, hub id, config.json, its directory, a GGUF file, or one as --model names it."),
]


def stored_file(name: str) -> str:
    """The path of the model that `ollama:NAME`, `org/name:TAG` or the name of a blob means; other names as they are."""
    if ":" not in name and not name.startswith("sha256-"):
        return name
    from foretell.model.load.reference import resolve_reference

    return str(resolve_reference(name))


Device = Annotated[
    str,
    typer.Option(
        "--hardware", "-H", help="Device; see `foretell roofline hardware`; `custom` takes the next options alone."
    ),
]
PlannedDevice = Annotated[
    str | None,
    typer.Option(
        "--hardware", "-H",
        help="Device; see `foretell roofline hardware`; `custom` takes the next options alone. Default: this "
        "machine, calibrated or estimated.",
    ),
]  # fmt: skip
DeviceFile = Annotated[Path | None, typer.Option("--hardware-file", help="TOML file with more devices.")]
StageName = Annotated[str, typer.Option(help=f"One of {', '.join(STAGES)}.")]
Tokens = Annotated[int, typer.Option("--tokens", "-n", help="verify: tokens per sequence, root included.")]
Axes = Annotated[
    list[str] | None, typer.Option("--sweep", help="batch=1:256, context=128:65536*2, weights=16,8,4; repeatable.")
]
OffloadParts = Annotated[
    str | None,
    typer.Option(
        "--offload", help="Parts in memory outside the device, as weights=1,kv=0.5; auto: the weights that do not fit."
    ),
]
OffloadTier = Annotated[str, typer.Option("--tier", help="Memory tier of --offload: ddr, ddr-server, nvme.")]
OffloadCompute = Annotated[
    str, typer.Option("--offload-compute", help="Where offloaded data are computed: device or host.")
]
DraftVocab = Annotated[
    int | None, typer.Option(help="Tokens that drafters of one layer score, in place of those of the published ones.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
ExtraModels = Annotated[
    list[str] | None, typer.Option("--model", help="A model of your own beside the built-in ones; repeatable.")
]


def print_records(rows: list[dict[str, Any]], as_json: bool, as_csv: bool, title: str = "") -> None:
    """Print records as a table, JSON or CSV."""
    check_output_options(as_json, as_csv)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif as_csv:
        typer.echo(records.to_csv(rows), nl=False)
    else:
        out = console()
        out.print(report.plain_table(rows, out.width, title))


def check_output_options(as_json: bool, as_csv: bool) -> None:
    """Check that one output format was chosen.

    Raises:
        ValueError: two were chosen.
    """
    if as_json and as_csv:
        raise ValueError("--json and --csv were given; leave out one of them")


_PIPED_WIDTH = 160
"""Width of tables where neither a terminal nor COLUMNS sets one."""


def console() -> Console:
    """The console for tables, as wide as the terminal or COLUMNS."""
    terminal = Console()
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(width=_PIPED_WIDTH)


def exit_with_error(sentence: str | None) -> None:
    """Print the sentence, if any, and exit with status 1."""
    if sentence:
        print_error(sentence)
        raise typer.Exit(1)
