"""The cache folder of packed weights: what it may hold, what is in it, and what leaves it first."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from foretell.model.kernels import build
from foretell.model.kernels.packed_file import FORMAT_VERSION, PackedFileError, PackedReader, PackedWriter
from foretell.utils.unfinished import remove_unfinished, unfinished_prefix

log = logging.getLogger(__name__)
SUFFIX = ".packed"
_NAME = re.compile(".+-[0-9a-f]{16}" + re.escape(SUFFIX))
"""Names of the files of the cache; others are not its own."""
KERNELS = "kernels"
WORTH_CACHING = 16 << 20
"""Bytes of packed weights from which on reading them is faster than packing again."""
_SAMPLE = 1 << 20
"""Bytes at the head of a model file that its identity includes; the header of most formats."""
_LARGEST, _LARGEST_SHARE = 64 << 30, 0.25
"""Default limit: bytes, and share of the disk."""
_RESERVE, _RESERVE_SHARE = 1 << 30, 0.05
"""What stays free on the disk: bytes, and share of it."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def cache_folder() -> Path:
    """$FORETELL_CACHE, or the folder `foretell/weights` in the user's cache directory."""
    chosen = os.environ.get("FORETELL_CACHE")
    return Path(chosen).expanduser() if chosen else build.cache_directory() / "weights"


def cache_limit(folder: Path) -> int:
    """Bytes that the folder may hold: $FORETELL_CACHE_LIMIT (such as 20G; 0: no cache), else a share of the disk.

    Raises:
        ValueError: the variable is no size.
    """
    limit = os.environ.get("FORETELL_CACHE_LIMIT", "").strip()
    if limit:
        return _parse_size(limit)
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return min(_LARGEST, int(_LARGEST_SHARE * shutil.disk_usage(existing).total))


def _parse_size(text: str) -> int:
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except ValueError:
        raise ValueError(
            f"FORETELL_CACHE_LIMIT is {text!r}, which is no size; write for example 20G, or 0 for no cache"
        ) from None


@dataclass(frozen=True)
class CacheEntry:
    """A file of the cache."""

    path: Path
    model: str
    """Path of the model; empty: kernels."""
    dtype: str
    """Of the weights, or `kernels`."""
    bytes: int
    used: float
    """Time of the last use, seconds since the epoch."""

    @property
    def name(self) -> str:
        """Its name without the ending."""
        return self.path.name.removesuffix(SUFFIX)


def cache_entries() -> list[CacheEntry]:
    """What the cache holds, the last used first."""
    entries = []
    for path in filter(lambda p: _NAME.fullmatch(p.name), cache_folder().glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            try:
                with PackedReader(path) as reader:
                    model, dtype = str(reader.header.get("model", "")), str(reader.header.get("dtype", ""))
            except PackedFileError:
                model, dtype = "(damaged)", ""
            entries.append(CacheEntry(path, model, dtype, stat.st_size, stat.st_mtime))
    return sorted(entries, key=lambda entry: -entry.used)


def kernel_entries() -> list[CacheEntry]:
    """The kernels that were compiled on this machine, the last used first."""
    entries = []
    for path in build.kernel_files():
        with contextlib.suppress(OSError):
            stat = path.stat()
            entries.append(CacheEntry(path, "", KERNELS, stat.st_size, stat.st_mtime))
    return sorted(entries, key=lambda entry: -entry.used)


def remove_entries(entries: Iterable[CacheEntry]) -> int:
    """Remove files of the cache; returns the bytes that this freed. A process that has read one goes on with it.

    Raises:
        OSError: a file cannot be removed.
    """
    freed = 0
    for entry in entries:
        entry.path.unlink(missing_ok=True)
        freed += entry.bytes
    return freed


class PackedWeightsFile:
    """The place of a model's packed weights in the cache.

    `files`: those that the weights come from; their paths, sizes, times and heads identify them, and `details`
    everything else that the packed weights depend on.
    """

    def __init__(self, files: Iterable[Path], dtype: str, details: Iterable[str]) -> None:
        files = [file.resolve() for file in files]
        key = [str(FORMAT_VERSION), dtype, build.packing_key(), *details, *map(_identity, files)]
        self.model, self.dtype = str(files[0].parent if files[0].suffix == ".safetensors" else files[0]), dtype
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"{Path(self.model).stem}-{dtype}-{digest}{SUFFIX}"

    def open(self) -> PackedReader | None:
        """The packed weights; None: there are none. A damaged file is removed, with a message."""
        try:
            reader = PackedReader(self.path)
        except OSError:
            return None
        except PackedFileError as error:
            self.discard(error)
            return None
        with contextlib.suppress(OSError):  # a read-only folder
            os.utime(self.path)
        return reader

    def discard(self, error: PackedFileError) -> None:
        """Remove the file, which is damaged."""
        log.warning("%s; packing the weights again", error)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def create(self, size: int) -> "UnfinishedFile | None":
        """A new file for about `size` bytes, for which others leave the cache; None: there is no place for it."""
        folder = self.path.parent
        limit = cache_limit(folder)
        if size < WORTH_CACHING:
            return None
        if size > limit:
            if limit:
                log.warning("the packed weights (%d MiB) exceed the cache's limit of %d MiB: not kept; see "
                            "FORETELL_CACHE_LIMIT", size >> 20, limit >> 20)  # fmt: skip
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _make_room(folder, size, limit)
            return UnfinishedFile(self)
        except OSError as error:
            report_not_kept(error)
            return None


def report_not_kept(error: OSError) -> None:
    """Say why packed weights are not in the cache."""
    where = f"{error.filename}: " if error.filename else ""
    log.warning("the packed weights are not kept for the next start: %s%s", where, error.strerror or error)


def _make_room(folder: Path, size: int, limit: int) -> None:
    """Remove files that interrupted processes left, then the least recently used weights."""
    remove_unfinished(folder)
    entries = cache_entries()
    while True:
        disk = shutil.disk_usage(folder)
        short_of_disk = disk.free - size < max(_RESERVE, int(_RESERVE_SHARE * disk.total))
        if not short_of_disk and sum(entry.bytes for entry in entries) + size <= limit:
            return
        if not entries:
            raise OSError(f"{folder}: {size >> 20} MiB would fill the disk ({disk.free >> 20} MiB are free)")
        remove_entries([entries.pop()])


class UnfinishedFile:
    """A file that is being written; it gets its name when it is complete, so that no one reads a part of it."""

    def __init__(self, target: PackedWeightsFile) -> None:
        self._target = target
        handle, name = tempfile.mkstemp(".tmp", unfinished_prefix(), target.path.parent)
        os.close(handle)
        self.writer = PackedWriter(Path(name))

    def finish(self) -> None:
        """Give the file its name. Of two processes that made the same, the last one replaces an equal file.

        Raises:
            OSError: the disk is full or fails.
        """
        self.writer.finish({"model": self._target.model, "dtype": self._target.dtype})
        self.writer.path.replace(self._target.path)

    def abandon(self) -> None:
        """Remove what was written."""
        self.writer.close()
        with contextlib.suppress(OSError):
            self.writer.path.unlink(missing_ok=True)


def _identity(file: Path) -> str:
    stat = file.stat()
    with file.open("rb") as opened:
        head = hashlib.sha256(opened.read(_SAMPLE)).hexdigest()
    return f"{file} {stat.st_size} {stat.st_mtime_ns} {head}"
