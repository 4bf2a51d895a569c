"""`foretell cache`: the packed weights and compiled kernels that are kept for the next start."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options
from foretell.utils.names import unknown

if TYPE_CHECKING:
    from foretell.model.load.packed_cache import CacheEntry

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def cache(
    action: Annotated[str, typer.Argument(metavar="[list|clear]", help="What to do.")] = "list",
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="With clear: files, models or their paths, dtypes, or kernels."),
    ] = None,
    all_files: Annotated[bool, typer.Option("--all", help="With clear: remove everything.")] = False,
    as_json: options.Json = False,
) -> None:
    """List or clear the packed weights and compiled kernels that are kept for the next start.

    Weights are in $FORETELL_CACHE, by default foretell/weights in the user's cache directory. $FORETELL_CACHE_LIMIT
    (such as 20G; 0: no cache) limits their size; what was used least recently leaves first. Kernels that were not used
    for 30 days leave when others are compiled.
    """
    if action == "list":
        if names or all_files:
            raise ValueError("names and --all go with `foretell cache clear`")
        _list(as_json)
    elif action == "clear":
        _clear(names or (), all_files, as_json)
    else:
        raise unknown("action", action, ["list", "clear"])


def _list(as_json: bool) -> None:
    from foretell.model.kernels.build import cache_directory
    from foretell.model.load.packed_cache import cache_entries, cache_folder, cache_limit, kernel_entries

    folder, entries, kernels = cache_folder(), cache_entries(), kernel_entries()
    limit = cache_limit(folder)
    if as_json:
        listing: dict[str, object] = {"folder": str(folder), "limit_bytes": limit, "entries": _records(entries)}
        listing |= {"kernels_folder": str(cache_directory()), "kernels": _records(kernels)}
        typer.echo(json.dumps(listing, indent=1))
        return
    for entry in (*entries, *kernels):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        typer.echo(f"{entry.bytes / 1e6:9,.0f} MB  last used {used}  {entry.dtype:16}  {entry.name}")
        if entry.model:
            typer.echo(f"{'':14}{entry.model}")
    typer.echo(f"{folder}: {_total(entries)} of at most {limit / 1e6:,.0f} MB")
    typer.echo(f"{cache_directory()}: {_total(kernels)} of kernels")


def _total(entries: Sequence["CacheEntry"]) -> str:
    return f"{len(entries)} files, {sum(entry.bytes for entry in entries) / 1e6:,.0f} MB"


def _clear(names: Sequence[str], all_files: bool, as_json: bool) -> None:
    from foretell.model.load.packed_cache import cache_entries, kernel_entries, remove_entries

    if bool(names) == all_files:
        raise ValueError("name what to remove (`foretell cache` lists it), or give --all")
    entries = [*cache_entries(), *kernel_entries()]
    chosen = entries if all_files else list({e.path: e for name in names for e in _named(name, entries)}.values())
    freed = remove_entries(chosen)
    if as_json:
        typer.echo(json.dumps({"removed": [entry.name for entry in chosen], "bytes": freed}))
    else:
        typer.echo(f"removed {len(chosen)} files, {freed / 1e6:,.0f} MB")


def _named(name: str, entries: Sequence["CacheEntry"]) -> list["CacheEntry"]:
    known = ((e, (e.name, e.path.name, e.dtype, e.model, Path(e.model).name, Path(e.model).stem)) for e in entries)
    matching = [entry for entry, its_names in known if name in its_names]
    if not matching:
        raise unknown("file of the cache", name, [entry.name for entry in entries])
    return matching


def _records(entries: Sequence["CacheEntry"]) -> list[dict[str, object]]:
    return [{"name": e.name, "model": e.model, "dtype": e.dtype, "bytes": e.bytes, "last_use": e.used} for e in entries]
