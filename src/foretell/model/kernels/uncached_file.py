"""Reads of a file that leave nothing in the system's page cache."""

import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from foretell.model.kernels.pack import allocate

PAGE = 4096
"""Reads past the page cache begin and end at multiples of this."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class UncachedFile:
    """A file that is read past the page cache, so that what is read takes memory once: with O_DIRECT, or, where the
    file system does not have it, through the cache, which is then told to forget the pages.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.is_direct = path, False
        if _DIRECT and sys.platform == "linux":
            with suppress(OSError):
                self._file, self.is_direct = os.open(path, os.O_RDONLY | _DIRECT), True
        if not self.is_direct:
            self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, offset: int, size: int) -> Tensor:
        """So many bytes from an offset on, both multiples of `PAGE`, in new memory.

        Raises:
            OSError: the file ends before, or cannot be read.
        """
        memory = allocate(size)
        self.read_into(memory.numpy().data, offset)
        return memory

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory that begins at a page and is a multiple of `PAGE` from an offset on.

        Raises:
            OSError: as `read`.
        """
        size, have = len(target), 0
        while have < size:
            got = os.preadv(self._file, [target[have:]], offset + have)
            if not got:
                raise OSError(f"{self._path}: truncated, {size - have} bytes are missing from {offset + have} on")
            have += got
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_DONTNEED)
