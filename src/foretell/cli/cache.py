"""`foretell cache`: the packed weights that are kept for the next start."""

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
        list[str] | None, typer.Argument(metavar="NAME", help="With clear: names of files or models, paths of models.")
    ] = None,
    all_files: Annotated[bool, typer.Option("--all", help="With clear: remove everything.")] = False,
    as_json: options.Json = False,
) -> None:
    """List or clear the packed weights that are kept for the next start.

    The folder is $FORETELL_CACHE, by default foretell/weights in the user's cache directory. $FORETELL_CACHE_LIMIT
    (such as 20G; 0: no cache) limits its size; what was used least recently leaves first.
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
    from foretell.model.load.packed_cache import cache_entries, cache_folder, cache_limit

    folder, entries = cache_folder(), cache_entries()
    limit = cache_limit(folder)
    if as_json:
        records = [_record(entry) for entry in entries]
        typer.echo(json.dumps({"folder": str(folder), "limit_bytes": limit, "entries": records}, indent=1))
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        typer.echo(
            f"{entry.bytes / 1e6:9,.0f} MB  last used {used}  {entry.dtype:16}  {entry.name}\n{'':14}{entry.model}"
        )
    total = sum(entry.bytes for entry in entries)
    typer.echo(f"{folder}: {len(entries)} files, {total / 1e6:,.0f} MB of at most {limit / 1e6:,.0f} MB")


def _clear(names: Sequence[str], all_files: bool, as_json: bool) -> None:
    from foretell.model.load.packed_cache import cache_entries, remove_entries

    if bool(names) == all_files:
        raise ValueError("name what to remove (`foretell cache` lists it), or give --all")
    entries = cache_entries()
    chosen = entries if all_files else list({e.path: e for name in names for e in _named(name, entries)}.values())
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
