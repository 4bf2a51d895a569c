"""Maps the files of checkpoints into memory, and tells those that are not complete."""

import contextlib
import ctypes
import mmap
import os
import sys
import time
import weakref
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

_RECENT = 60.0
"""Seconds since the last change of a file within which it may be growing."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag, which Python does not name in all versions."""
_PAGE = mmap.PAGESIZE


class MappedFile(mmap.mmap):
    """A mapped file: writable, so that torch makes tensors of it; what is written stays in this process.

    No memory is reserved, so the file may be larger than it.
    """

    _direct: int | None = None
    """The file without the system's page cache."""

    def __new__(cls, path: Path) -> "MappedFile":  # noqa: D102
        with path.open("rb") as file:
            if sys.platform != "linux":
                return super().__new__(cls, file.fileno(), 0, access=mmap.ACCESS_COPY)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            mapped = super().__new__(cls, file.fileno(), 0, flags=flags, prot=protection)
        with contextlib.suppress(OSError):  # a file system that cannot
            mapped._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
            weakref.finalize(mapped, os.close, mapped._direct)
        return mapped

    def release_pages(self) -> None:
        """Return the pages to the system; they are read again when needed."""
        if sys.platform == "linux":
            self.madvise(mmap.MADV_DONTNEED)

    def read_at(self, address: int, size: int) -> UInt8[np.ndarray, " size"] | None:
        """Bytes of the file that are mapped at an address, read past the system's page cache, so that they take memory
        once. None: they are of no or another file, in the cache already, or cannot be read so.
        """
        start = np.frombuffer(self, np.uint8).ctypes.data
        offset, last = address - start, address - start + size
        first, end = offset & -_PAGE, -(-last // _PAGE) * _PAGE
        if self._direct is None or not 0 <= offset <= last <= end <= len(self):
            return None
        memory, resident = np.empty(end - first + _PAGE, np.uint8), np.ones((end - first) // _PAGE, np.uint8)
        at, count = ctypes.c_void_p(start + first), ctypes.c_size_t(end - first)
        if ctypes.CDLL(None).mincore(at, count, resident.ctypes) or (resident & 1).all():
            return None
        memory = memory[-memory.ctypes.data % _PAGE :][: end - first]
        with contextlib.suppress(OSError):  # a file system that asks for more than whole pages
            if os.preadv(self._direct, [memory.data], first) == len(memory):
                return memory[offset - first : last - first]
        return None


def what_is_missing(path: Path, what: str) -> str:
    """A sentence on a file of which only a part is here: `what` says so. It tells one that may be growing."""
    recent = time.time() - path.stat().st_mtime < _RECENT
    now = "it was written to a moment ago, so it may still be growing" if recent else "its download has stopped"
    return f"{path}: the download is not complete: {what}; {now}: let it finish"
