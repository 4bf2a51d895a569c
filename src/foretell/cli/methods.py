"""`foretell methods`: the catalogue as the field's taxonomy table."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from foretell.catalogue import Entry

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

COLUMNS = ("method", "draft", "tree", "accepts by", "lossless", "same seed", "needs", "training", "paper")


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """List the decoding methods: what drafts, how the drafts are arranged, and which rule accepts them.

    [bold]lossless[/]: the text follows the target's law exactly. [bold]same seed[/]: an equal seed also gives the very text of plain decoding.
    """
    from rich.console import Console

    from foretell.catalogue import catalogue

    entries = catalogue().values()
    if as_json:
        typer.echo(json.dumps([record(e) for e in entries], indent=1, ensure_ascii=False))
    elif markdown:
        typer.echo("\n".join(markdown_lines(entries)))
    else:
        Console().print(table(entries))


def record(entry: "Entry") -> dict[str, object]:
    """A line of the catalogue as `--json` prints it."""
    return {
        "name": entry.name,
        "draft": entry.draft,
        "tree": entry.tree,
        "accept": entry.accept,
        "lossless": entry.lossless,
        "same_seed": entry.same_seed,
        "needs": entry.needs,
        "training": entry.training,
        "paper": entry.paper,
        "aliases": list(entry.aliases),
    }


def cells(entry: "Entry") -> tuple[str, ...]:
    """A line of the catalogue in the order of `COLUMNS`."""
    lossless, same_seed = (
        ("yes" if entry.lossless else "NO"),
        ("yes" if entry.same_seed else "same law" if entry.lossless else "no"),
    )
    return (
        entry.name,
        entry.draft,
        entry.tree,
        entry.accept,
        lossless,
        same_seed,
        entry.needs or "-",
        entry.training,
        entry.paper,
    )


def markdown_lines(entries: "Iterable[Entry]") -> list[str]:
    """The table that the README holds."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{c[0]}`", *c[1:]) for c in map(cells, entries))]
    return [f"| {' | '.join(row)} |" for row in rows]


def table(entries: "Iterable[Entry]") -> "Table":
    """The table for a terminal."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        out.add_column(name, overflow="fold", no_wrap=name == "method")
    for entry in entries:
        out.add_row(*cells(entry), style="" if entry.lossless else "red")
    return out
