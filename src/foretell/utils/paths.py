"""Checks of paths that are written to, and files that are replaced at once."""

import os
from pathlib import Path


def require_empty(out: Path, *besides: str) -> None:
    """Refuse a path that is not a new or empty directory. `besides`: names that may be in it, of what an interrupted
    run left there.

    Raises:
        ValueError: there is a file, or a directory that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(path.name not in besides for path in out.iterdir())):
        raise ValueError(f"{out}: there is something already; name a directory that is new or empty with --out")


def require_file_place(out: Path | None) -> None:
    """Refuse a path that no file can be written to, before the work whose result it shall hold; None: nothing is.

    Raises:
        ValueError: it is a directory, or that of the file is missing or may not be written to.
    """
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"{out}: a directory is where a file is to be written; name a file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no directory {out.parent} to write {out.name} to")
    _require_permission(out if out.exists() else out.parent)


def require_folder_place(out: Path | None) -> None:
    """Refuse a path that no folder can be made at, before the work whose results it shall hold; None: nothing is.

    Raises:
        ValueError: it, or a part of its path, is a file, or it may not be written to.
    """
    if out is None:
        return
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"{place}: a file is where a folder is to be written; name another one")
    _require_permission(place)


def _require_permission(place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise ValueError(f"{place}: this may not be written to; name another place")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write or replace a file atomically: whoever reads it finds all of the old contents or of the new ones."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)
