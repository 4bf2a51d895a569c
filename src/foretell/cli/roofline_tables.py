"""`foretell roofline table1`, `figure`, `models` and `hardware`: the survey's figures, and what is known."""

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli.roofline_options import AsCsv, AsJson, DeviceFile, print_records
from foretell.roofline import records
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.hardware import known_hardware
from foretell.roofline.model_configs import builtin_models
from foretell.roofline.paper.figures import FIGURES, figure
from foretell.roofline.paper.table1 import table1
from foretell.utils.paths import require_file_place


def table1_command(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """Table 1 of the survey: Llama-2-7b on an A6000, 2048 tokens; our exact counts are in the last two columns."""
    table, title = table1(), "Table 1 of arXiv 2402.16363: Llama-2-7b, RTX A6000, 2048 tokens, batch 1"
    rows = records.table1_records(table) if as_json or as_csv else records.table1_text(table)
    print_records(rows, as_json, as_csv, title)


def figure_command(
    number: Annotated[int, typer.Argument(help=f"Figure of the survey: {', '.join(map(str, FIGURES))}.")],
    out: Annotated[
        Path, typer.Option(help="Picture to write (.png, .svg, .pdf); its data are written beside it as .csv.")
    ],
) -> None:
    """Draw a figure of the survey from our own numbers, and write its data as CSV."""
    from foretell.roofline.paper.plots import draw

    require_file_place(out)
    drawn = figure(number)
    draw(drawn, out)
    out.with_suffix(".csv").write_text(records.to_csv(drawn.records), "utf-8")
    typer.echo(f"{drawn.title}: {out} and {out.with_suffix('.csv')}\n{drawn.note}")


def models_command(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the built-in models."""
    print_records(
        [records.model_record(AnalyzedModel.named(name), str(raw["source"])) for name, raw in builtin_models().items()],
        as_json,
        as_csv,
        "cache_per_token: numbers in the keys and values of all layers; in 16 bits twice as many bytes",
    )


def hardware_command(hardware_file: DeviceFile = None, as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the known devices and the sources of their figures."""
    rows = [records.hardware_record(h) for h in known_hardware(hardware_file).values()]
    print_records(rows, as_json, as_csv, "bandwidth in bytes/s, capacity in bytes, peaks in OPs/s by format")
