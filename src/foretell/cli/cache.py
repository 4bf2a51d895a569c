"""`foretell cache`: the packed weights that are kept for the next start."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foretell.cli import options
from foretell.utils.names import unknown

if TYPE_CHECKING:
    from foretell.model.load.packed_cache import CacheEntry

app = typer.Typer(
    help="List or clear the packed weights that are kept for the next start.", pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: options.Json = False) -> None:
    """List what the cache holds: model, dtype, size and last use."""
    if context.invoked_subcommand is not None:
        return
    from foretell.model.load.packed_cache import cache_entries, cache_folder, cache_limit

    folder, entries = cache_folder(), cache_entries()
    limit = cache_limit(folder)
    if as_json:
        records = [_record(entry) for entry in entries]
        typer.echo(json.dumps({"folder": str(folder), "limit_bytes": limit, "entries": records}, indent=1))
        return
    table = Table("model", "dtype", "MB", "last use", "name")
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        table.add_row(Path(entry.model).name, entry.dtype, f"{entry.bytes / 1e6:,.0f}", used, entry.name)
    if entries:
        Console().print(table)
    total = sum(entry.bytes for entry in entries)
    typer.echo(f"{folder}: {len(entries)} files, {total / 1e6:,.0f} MB of at most {limit / 1e6:,.0f} MB")


@app.command()
def clear(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names of files, of models, or paths of models.")
    ] = None,
    all_files: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
    as_json: options.Json = False,
) -> None:
    """Remove packed weights; the next start of these models packs again."""
    from foretell.model.load.packed_cache import cache_entries, remove_entries

    if bool(names) == all_files:
        raise ValueError("name what to remove (`foretell cache` lists it), or give --all")
    entries = cache_entries()
    chosen = entries if all_files else list({e.path: e for name in names or () for e in _named(name, entries)}.values())
    freed = remove_entries(chosen)
    if as_json:
        typer.echo(json.dumps({"removed": [entry.name for entry in chosen], "bytes": freed}))
    else:
        typer.echo(f"removed {len(chosen)} files, {freed / 1e6:,.0f} MB")


def _named(name: str, entries: Sequence["CacheEntry"]) -> list["CacheEntry"]:
    found = [e for e in entries if name in (e.name, e.path.name, e.model, Path(e.model).name, Path(e.model).stem)]
    if not found:
        raise unknown("file of the cache", name, [entry.name for entry in entries])
    return found


def _record(entry: "CacheEntry") -> dict[str, object]:
    return {
        "name": entry.name,
        "model": entry.model,
        "dtype": entry.dtype,
        "bytes": entry.bytes,
        "last_use": entry.used,
    }
