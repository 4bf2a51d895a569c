"""What a person sees while a run goes and when it is over, and the files it leaves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foretell.bench import report
from foretell.bench.schema import Contender, Results


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it gives once per finished piece of work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def write(folder: Path, results: Results) -> list[Path]:
    """`results.json` and `report.md`, each replaced as a whole."""
    files = {"results.json": results.model_dump_json(indent=1), "report.md": report.markdown(results)}
    for name, text in files.items():
        part = folder / (name + ".part")
        part.write_text(text, "utf-8")
        part.replace(folder / name)
    return [folder / name for name in files]


def print_summary(results: Results) -> None:
    """Means over the categories, and the definitions."""
    console, peers = Console(), [c.name for c in results.contenders if c.peer]
    figures = [(c, [c.mean.tokens_per_pass, c.mean.tokens_per_second, c.mean.speedup]) for c in results.contenders]
    console.print(
        _means(
            f"{results.settings.tasks}: means over the categories",
            ["tokens per pass", "tokens/s", "speed-up"],
            figures,
            True,
        )
    )
    if peers:
        over = [(c, [c.mean.over_peers.get(p) for p in peers]) for c in results.contenders if not c.peer]
        console.print(_means("tokens/s over each peer", peers, over, False))
    for name, text in results.definitions.items():
        console.print(f"[bold]{name}[/]: {text}", style="dim", highlight=False)


def _means(
    title: str, columns: Sequence[str], rows: Sequence[tuple[Contender, Sequence[float | None]]], identity: bool
) -> Table:
    table = Table(title=title)
    table.add_column("contender", no_wrap=True)
    for name in [*columns, *(["identical"] if identity else [])]:
        table.add_column(name, justify="right", overflow="fold")
    for c, figures in rows:
        same = [f"{c.identical}/{c.compared}" if c.compared else "–"] if identity else []
        table.add_row(
            c.name + ("" if c.lossless else " (lossy)"), *("–" if f is None else f"{f:.2f}" for f in figures), *same
        )
    return table
