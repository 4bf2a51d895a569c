"""Names of files and folders that a process is still writing, how they take the place of what was there, and the
removal of those whose process ended.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_STALE_SECONDS = 3600
"""Age from which on something unfinished in a folder of several machines may belong to a process that ended."""
_PREFIX = "tmp"
_OURS = re.compile(rf"{_PREFIX}-(\d+)-[a-z0-9_]{{8}}(\.tmp)?")
"""What `tempfile` makes of `unfinished_prefix`."""
_AT_FDCWD, _EXCHANGE, _SWAP = -100, 2, 2
"""Of `renameat2` (Linux) and `renamex_np` (macOS)."""


def unfinished_prefix() -> str:
    """How the names of what this process writes into a shared folder begin; `tempfile` gives the rest."""
    return f"{_PREFIX}-{os.getpid()}-"


def remove_unfinished(folder: Path) -> None:
    """Remove what interrupted processes left in a folder: older than an hour, and without a living owner. What has
    another name than `tempfile` gives after `unfinished_prefix` belongs to others, and stays.
    """
    for path in folder.glob(f"{_PREFIX}-*"):
        name = _OURS.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if name and time.time() - path.stat().st_mtime >= _STALE_SECONDS and not _lives(int(name[1])):
                remove(path)


def part_of(out: Path) -> Path:
    """A hidden name beside `out` under which this process writes what `put_in_place` gives that name.

    Parts of `out` that ended processes left are removed first. An old output that such a process had set aside gets its
    name back if there is none.
    """
    parts = re.compile(rf"\.{re.escape(out.name)}\.(\d+)\.(part|old)(?:{re.escape(out.suffix)})?")
    for path in sorted(out.parent.glob(".*")) if out.parent.is_dir() else ():
        name = parts.fullmatch(path.name)
        if name is None or _lives(int(name[1])):
            continue
        if name[2] == "old" and not out.exists():
            path.rename(out)
        remove(path)
    return _hidden(out, "part")


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A hidden name to write a file or a folder under, which then takes the place of `out` in one step; after an error
    nothing of it is left. Folders above `out` are made.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(out)
    try:
        yield part
        put_in_place(part, out)
    finally:
        remove(part)


def _hidden(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{os.getpid()}.{kind}{out.suffix}")


def put_in_place(part: Path, out: Path) -> None:
    """Give a complete part its name, and remove what had it. There is an output under the name at every moment, where
    the system can exchange two folders; elsewhere the old one has a name that `part_of` knows for an instant.
    """
    if not out.is_dir() or not any(out.iterdir()):
        part.replace(out)
    elif _exchange(part, out):
        remove(part)
    else:
        old = _hidden(out, "old")
        out.rename(old)
        try:
            part.rename(out)
        except BaseException:
            old.rename(out)
            raise
        remove(old)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders in one step; False: the system or its file system cannot."""
    call = _exchange_call()
    if call is None:
        return False
    if call(os.fsencode(first), os.fsencode(second)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


@cache
def _exchange_call() -> Callable[[bytes, bytes], int] | None:
    """The system's function; None: it has none."""
    library = ctypes.CDLL(None, use_errno=True)
    if (linux := getattr(library, "renameat2", None)) is not None:
        return lambda first, second: int(linux(_AT_FDCWD, first, _AT_FDCWD, second, _EXCHANGE))
    if (mac := getattr(library, "renamex_np", None)) is not None:
        return lambda first, second: int(mac(first, second, _SWAP))
    return None


def _lives(process: int) -> bool:
    """Whether a process runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process
        return True
    return True
