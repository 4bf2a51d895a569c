"""Names of files and folders that a process is still writing, and the removal of those whose process ended."""

import contextlib
import os
import shutil
import time
from pathlib import Path

_STALE_SECONDS = 3600
"""Age from which on something unfinished may belong to a process that ended."""
_PREFIX = "tmp"


def unfinished_prefix() -> str:
    """How the names of what this process writes begin."""
    return f"{_PREFIX}-{os.getpid()}-"


def remove_unfinished(folder: Path) -> None:
    """Remove what interrupted processes left in a folder: older than an hour, and without a living owner."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _STALE_SECONDS or _owner_lives(path):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _owner_lives(path: Path) -> bool:
    """Whether the process that a name gives runs on this machine."""
    number = path.name.split("-")[1:2]
    if not (number and number[0].isdecimal()):
        return False
    try:
        os.kill(int(number[0]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process
        return True
    return True
