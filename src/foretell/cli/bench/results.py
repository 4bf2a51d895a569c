"""`foretell bench compare`, `schema` and `report`: what is done with written results."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.compare import compare, settings_differences
from foretell.bench.console import print_comparison
from foretell.bench.output import read_results, write_results
from foretell.bench.schema import BenchResults
from foretell.cli.errors import print_error


def compare_(
    first: Annotated[Path, typer.Argument(metavar="A", help="results.json, or its folder.")],
    second: Annotated[Path, typer.Argument(metavar="B")],
) -> None:
    """Compare two results question by question, with bootstrap confidence intervals."""
    a, b = read_results(first), read_results(second)
    for difference in settings_differences(a, b):
        print_error(difference)
    print_comparison(compare(a, b), (str(first), str(second)))


def schema() -> None:
    """Print the JSON schema of results.json."""
    typer.echo(json.dumps(BenchResults.model_json_schema(), indent=1))


def report_(
    results: Annotated[Path, typer.Argument(help="results.json, or its folder.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.html and the charts.")],
) -> None:
    """Write the reports and charts of results again."""
    for path in write_results(out, read_results(results)):
        typer.echo(str(path))
