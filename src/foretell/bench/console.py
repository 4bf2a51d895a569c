"""What a person sees while a run goes and when it is over, and the files it leaves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foretell.bench.charts import draw_charts
from foretell.bench.html_report import render_html
from foretell.bench.report import category_table, render_markdown
from foretell.bench.schema import BenchResults, CompetitorResult
from foretell.utils.validation import validate_json


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it gives once per finished piece of work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def write_results(folder: Path, results: BenchResults) -> list[Path]:
    """`results.json`, `report.md`, `report.html` and, where matplotlib is installed, charts; each file is replaced as a
    whole.
    """
    files = {"results.json": results.model_dump_json(indent=1).encode(), "report.md": render_markdown(results).encode()}
    pictures: dict[str, bytes] = {}
    if find_spec("matplotlib") is not None:
        pictures = draw_charts(results)
    files["report.html"] = render_html(results, pictures).encode()
    files |= {f"{name}.png": png for name, png in pictures.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        part = folder / (name + ".part")
        part.write_bytes(content)
        part.replace(folder / name)
    return [folder / name for name in files]


def read_results(path: Path) -> BenchResults:
    """Results of an earlier run: `results.json`, or the folder it is in.

    Raises:
        ValueError: there are none, or the file is damaged or of another format.
    """
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: no results here; give a results.json that `foretell bench run` or `replay` wrote, or its folder"
        )
    return validate_json(BenchResults, file.read_bytes(), f"{file}: not results of `foretell bench`")


def print_summary(results: BenchResults) -> None:
    """Means over the categories, and the definitions."""
    console, peers = Console(), [c.name for c in results.competitors if c.peer]
    figures = [
        (c, [c.category_means.tokens_per_pass, c.category_means.tokens_per_second, c.category_means.speedup])
        for c in results.competitors
    ]
    console.print(
        _means(
            f"{results.settings.tasks}: means over the categories",
            ["tokens per pass", "tokens/s", "speed-up"],
            figures,
            True,
        )
    )
    if peers:
        over = [(c, [c.category_means.over_peers.get(p) for p in peers]) for c in results.competitors if not c.peer]
        console.print(_means("tokens/s over each peer", peers, over, False))
    for name, text in results.definitions.items():
        console.print(f"[bold]{name}[/]: {text}", style="dim", highlight=False)


def _means(
    title: str, columns: Sequence[str], rows: Sequence[tuple[CompetitorResult, Sequence[float | None]]], identity: bool
) -> Table:
    table = Table(title=title)
    table.add_column("competitor", no_wrap=True)
    for name in [*columns, *(["identical"] if identity else [])]:
        table.add_column(name, justify="right", overflow="fold")
    for c, figures in rows:
        same = [f"{c.identical}/{c.compared}" if c.compared else "–"] if identity else []
        table.add_row(
            c.name + ("" if c.lossless else " (lossy)"), *("–" if f is None else f"{f:.2f}" for f in figures), *same
        )
    return table


def print_replay(results: BenchResults) -> None:
    """Tokens per pass by category."""
    sheet = category_table(results, lambda f: f.tokens_per_pass, False)
    table = Table(title=f"tokens per pass on recorded {results.settings.tasks}")
    for i, name in enumerate([*sheet.header, "mean", "drafted per pass"]):
        table.add_column(name, no_wrap=not i, justify="right" if i else "left")
    for row, c in zip(sheet.rows, results.competitors, strict=True):
        figures = [*row[1:], c.category_means.tokens_per_pass, c.pooled.drafted_per_pass]
        table.add_row(c.name, *(f"{f:.2f}" if isinstance(f, float) else "–" for f in figures))
    console = Console()
    console.print(table)
    console.print(
        "Lower bounds for methods that learn from the target's scores at rejected or probed nodes: recycling, "
        "lookahead, Jacobi.",
        style="dim",
    )
