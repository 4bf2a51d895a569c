"""Maps the files of checkpoints into memory, and tells those that are not complete."""

import mmap
import sys
import time
from pathlib import Path

_RECENT = 60.0
"""Seconds since the last change of a file within which it may be growing."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag, which Python does not name in all versions."""


def map_file(path: Path) -> mmap.mmap:
    """Map a file: writable, so that torch makes tensors of it; what is written stays in this process.

    No memory is reserved, so the file may be larger than it.
    """
    with path.open("rb") as file:
        if sys.platform != "linux":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=protection)


def what_is_missing(path: Path, what: str) -> str:
    """A sentence on a file of which only a part is here: `what` says so. It tells one that may be growing."""
    recent = time.time() - path.stat().st_mtime < _RECENT
    now = "it was written to a moment ago, so it may still be growing" if recent else "its download has stopped"
    return f"{path}: the download is not complete: {what}; {now}: let it finish"


def release_pages(data: mmap.mmap) -> None:
    """Return the pages of a mapped file to the system; they are read again when needed."""
    if sys.platform == "linux":
        data.madvise(mmap.MADV_DONTNEED)
