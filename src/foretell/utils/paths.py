"""Checks of paths that are written to."""

from pathlib import Path


def require_empty(out: Path, besides: str = "") -> None:
    """Refuse a path that is not a new or empty directory. `besides`: a name that may be in it, of what an interrupted
    run left there.

    Raises:
        ValueError: there is a file, or a directory that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(path.name != besides for path in out.iterdir())):
        raise ValueError(f"{out}: there is something already; name a directory that is new or empty with --out")
