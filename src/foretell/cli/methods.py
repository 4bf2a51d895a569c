"""`foretell methods`: the catalogue of methods as a table, or one method explained.

`methods.json` says what the catalogue does of its own methods, since importing that takes seconds, most of them torch;
`python tools/documents.py --write` writes it.
"""

import json
import sys
import textwrap
from collections.abc import Iterable
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace as Record
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.utils.names import METHODS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretell.catalogue import Entry

app = typer.Typer(pretty_exceptions_enable=False)

FILE = Path(__file__).with_name("methods.json")
COLUMNS = (
    "method", "family", "draft", "tree", "accepts by", "lossless", "same seed", "needs", "training", "paper",
)  # fmt: skip
_WIDE = 200
"""Terminal columns from which the table is printed: every method then takes a line or two."""
_TEXT_WIDTH = 100
"""Most columns of the explanation of one method, and of Markdown prose."""


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="METHOD", help="Explain this method.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """List the decoding methods: drafter, shape of the draft tree, and acceptance rule.

    With the name of a method: what it does, when to use it, its options with their defaults, and its paper.

    lossless: the output follows the target's distribution exactly.
    same seed: for an equal seed, the output also equals that of plain decoding.
    """
    from rich.console import Console

    from foretell.cli.errors import print_error
    from foretell.speculator.installed import find_all_installed

    if as_json and markdown:
        raise ValueError("--json and --markdown are two formats; give one of them")
    entries, problems = _all_methods()
    entry = None if name is None else _find(name, entries)
    if as_json:
        typer.echo(json.dumps(entries if entry is None else entry, indent=1, ensure_ascii=False, default=vars))
    elif markdown:
        typer.echo("\n".join(markdown_table(entries) if entry is None else markdown_section(entry)))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
        if entry is not None:
            console.print(method_details(entry), width=min(_TEXT_WIDTH, console.width))
        else:
            console.print(wide_table(entries) if console.width >= _WIDE else narrow_list(entries))
    for problem in (*problems, *find_all_installed().problems):
        print_error(problem)


def _all_methods() -> tuple[list[Record], tuple[str, ...]]:
    """Records of all methods, and what is wrong with those of other packages. Where there are none of these, the
    catalogue is not imported.
    """
    if not entry_points(group=METHODS):
        records = json.loads(FILE.read_text("utf-8"), object_hook=lambda values: Record(**values))
        return [with_packages(record) for record in records], ()
    from foretell.catalogue import catalogue, installed_methods

    return [with_packages(record_of(e)) for e in catalogue().values()], installed_methods().problems


def _find(name: str, entries: Iterable[Record]) -> Record:
    """The method of this name or alias.

    Raises:
        ValueError: as `foretell.catalogue.find`.
    """
    named = {e.name: e for e in entries}
    by_alias = {alias: e for e in named.values() for alias in e.aliases}
    entry = named.get(name) or by_alias.get(name)
    if entry is None:
        from foretell.catalogue import find

        return named[find(name).name]
    return entry


def record_of(entry: "Entry") -> Record:
    """A method as `methods.json` holds it, and as `--json` prints it."""
    return Record(
        name=entry.name,
        family=entry.family,
        description=entry.description,
        when_to_use=entry.when_to_use,
        draft=entry.draft,
        tree=entry.tree,
        accept=entry.accept,
        lossless=entry.lossless,
        same_seed=entry.same_seed,
        needs=entry.needs,
        speculator=entry.speculator or None,
        ships_for=[],
        training=entry.training,
        papers=[Record(title=p.title, arxiv=p.arxiv or None) for p in entry.papers],
        aliases=entry.aliases,
        options=entry.option_list(),
    )


def with_packages(record: Record) -> Record:
    """The record with the targets that a speculator of the method's kind is installed for."""
    from foretell.speculator.installed import find_all_installed

    ready = [s.target for s in find_all_installed().speculators if s.kind == record.speculator]
    record.ships_for = list(dict.fromkeys(ready))
    return record


def table_row(entry: Record) -> tuple[str, ...]:
    """The cells of a method's row in the order of `COLUMNS`."""
    return (
        entry.name,
        entry.family,
        entry.draft,
        entry.tree,
        entry.accept,
        "yes" if entry.lossless else "NO",
        "yes" if entry.same_seed else "same distribution" if entry.lossless else "no",
        _needs(entry),
        entry.training,
        "; ".join(p.title if not p.arxiv else f"arXiv {p.arxiv}" for p in entry.papers) or "-",
    )


def _needs(entry: Record) -> str:
    if not entry.speculator:
        return entry.needs or "-"
    ready = entry.ships_for
    return f"speculator (ships for {', '.join(ready)})" if ready else "speculator (train one)"


def _guarantee(entry: Record) -> str:
    if not entry.lossless:
        return "LOSSY"
    return "lossless, same text for a seed" if entry.same_seed else "lossless, same distribution"


def markdown_table(entries: Iterable[Record]) -> list[str]:
    """The table of methods in README.md."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{c[0]}`", *c[1:]) for c in map(table_row, entries))]
    return [f"| {' | '.join(row)} |" for row in rows]


def markdown_section(entry: Record) -> list[str]:
    """The generated part of one method's section in docs/methods.md."""
    papers = "; ".join(
        f"*{p.title}*" + (f", [arXiv {p.arxiv}](https://arxiv.org/abs/{p.arxiv})" if p.arxiv else "")
        for p in entry.papers
    )
    facts = [
        entry.description,
        "",
        f"- Parts: {entry.draft} × {entry.tree} × {entry.accept}; {_guarantee(entry)}.",
        *([f"- Needs: {_needs(entry)}."] if _needs(entry) != "-" else []),
        f"- When to use it: {entry.when_to_use}",
        *([f"- Paper: {papers}."] if papers else []),
        *([f"- Other names: {', '.join(f'`{a}`' for a in entry.aliases)}."] if entry.aliases else []),
        "",
    ]
    lines = [line for fact in facts for line in _wrapped(fact)]
    options = entry.options
    if not options:
        return [*lines, "It has no options."]
    rows = (
        f"| {', '.join(f'`{n}`' for n in (o.name, *o.aliases))} | {_default(o.default)} | {o.type} | {o.description} |"
        for o in options
    )
    return [*lines, "| option | default | type | |", "| --- | --- | --- | --- |", *rows]


def _wrapped(text: str) -> list[str]:
    """A paragraph or a list item of Markdown in lines."""
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.wrap(text, _TEXT_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _default(value: object) -> str:
    return "unset" if value is None else json.dumps(value, default=vars).strip('"')


def wide_table(entries: Iterable[Record]) -> "RenderableType":
    """The table for a wide terminal."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        out.add_column(name, no_wrap=name in ("method", "family", "lossless", "training"))
    for entry in entries:
        out.add_row(*table_row(entry), style="" if entry.lossless else "red")
    return out


def narrow_list(entries: Iterable[Record]) -> "RenderableType":
    """The list for a narrow terminal: a heading per family, two lines per method."""
    from rich.console import Group
    from rich.text import Text

    def paragraph(entry: Record) -> Text:
        name, _, draft, tree, accept, *_, needs, training, paper = table_row(entry)
        text = Text(name, style="bold" if entry.lossless else "bold red")
        text.append(f"  {draft} × {tree} × {accept}\n", style="not bold")
        extras = (
            [f"needs {needs}"] * (needs != "-")
            + [f"training {training}"] * (training != "none")
            + [paper] * (paper != "-")
        )
        return text.append("    " + " · ".join([_guarantee(entry), *extras]), style="dim not bold")

    groups = groupby(entries, key=lambda e: e.family)
    return Group(*(t for family, some in groups for t in (Text(family, style="underline"), *map(paragraph, some))))


def method_details(entry: Record) -> "RenderableType":
    """One method for the terminal."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    title = Text(entry.name, style="bold" if entry.lossless else "bold red")
    title.append(f"  {entry.family}, {_guarantee(entry)}", style="dim not bold")
    facts = [
        ("parts", f"{entry.draft} × {entry.tree} × {entry.accept}"),
        ("needs", _needs(entry)),
        ("when to use it", entry.when_to_use),
        *(("paper", f"{p.title}" + (f", arXiv {p.arxiv}" if p.arxiv else "")) for p in entry.papers),
        ("other names", ", ".join(entry.aliases) or "-"),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for key, value in facts:
        if value != "-":
            grid.add_row(Text(key, style="dim"), Text(value))
    out: list[RenderableType] = [title, Text(entry.description), grid]
    for option in entry.options:
        head = Text.assemble((option.name, "bold"), f" = {_default(option.default)}", (f"  {option.type}", "dim"))
        aliases = f" Other names: {', '.join(option.aliases)}." if option.aliases else ""
        out += [head, Padding(Text(option.description + aliases), (0, 0, 0, 4))]
    return Group(*out)
