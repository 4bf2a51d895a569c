"""`foretell methods`: the catalogue as the field's taxonomy table."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretell.catalogue import Entry

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

COLUMNS = ("method", "draft", "tree", "accepts by", "lossless", "same seed", "needs", "training", "paper")
_WIDE = 190
"""Columns of a terminal on which every method fits on a line or two."""


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
    from foretell.cli.errors import say
    from foretell.speculator.installed import installed

    entries = catalogue().values()
    if as_json:
        typer.echo(json.dumps([record(e) for e in entries], indent=1, ensure_ascii=False))
    elif markdown:
        typer.echo("\n".join(markdown_lines(entries)))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
        console.print(table(entries) if console.width >= _WIDE else paragraphs(entries))
    for problem in installed().problems:
        say(problem)


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
        "speculator": entry.speculator or None,
        "ships_for": ships_for(entry),
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
        _needs(entry),
        entry.training,
        entry.paper,
    )


def ships_for(entry: "Entry") -> list[str]:
    """The models for which a speculator of its kind is installed."""
    from foretell.speculator.installed import installed

    return list(dict.fromkeys(s.target for s in installed().speculators if s.kind == entry.speculator))


def _needs(entry: "Entry") -> str:
    if not entry.speculator:
        return entry.needs or "-"
    ready = ships_for(entry)
    return f"speculator (ships for {', '.join(ready)})" if ready else "speculator (train one)"


def markdown_lines(entries: "Iterable[Entry]") -> list[str]:
    """The table that the README holds."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{c[0]}`", *c[1:]) for c in map(cells, entries))]
    return [f"| {' | '.join(row)} |" for row in rows]


def table(entries: "Iterable[Entry]") -> "RenderableType":
    """The table for a wide terminal."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        out.add_column(name, no_wrap=name in ("method", "lossless", "same seed", "training"))
    for entry in entries:
        out.add_row(*cells(entry), style="" if entry.lossless else "red")
    return out


def paragraphs(entries: "Iterable[Entry]") -> "RenderableType":
    """The same for a narrow terminal: a method takes two lines."""
    from rich.console import Group
    from rich.text import Text

    def paragraph(entry: "Entry") -> Text:
        name, draft, tree, accept, *_, needs, training, paper = cells(entry)
        text = Text(name, style="bold" if entry.lossless else "bold red")
        text.append(f"  {draft} × {tree} × {accept}\n", style="not bold")
        promise = (
            "LOSSY"
            if not entry.lossless
            else "lossless, same text for a seed"
            if entry.same_seed
            else "lossless, same law"
        )
        extras = (
            [f"needs {needs}"] * (needs != "-")
            + [f"training {training}"] * (training != "none")
            + [paper] * (paper != "-")
        )
        return text.append("    " + " · ".join([promise, *extras]), style="dim not bold")

    return Group(*map(paragraph, entries))
