"""Loads the CPU kernels: those of the wheel for this processor, else compiled once per machine.

The library works without them where both fail.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.model.kernels import instruction_sets, packaged, structures
from foretell.utils.unfinished import remove_unfinished, unfinished_prefix

SOURCES = structures.SOURCES
"""Directory of the translation units and their headers."""
FLAGS = (*packaged.FLAGS, "-march=native")
_KERNELS = re.compile(r"kernels-[0-9a-f]{20}\.so")
"""Names of compiled kernels."""
log = logging.getLogger(__name__)
_COMPILE_SECONDS = 300
"""How long the compiler may take."""
_UNUSED_SECONDS = 30 * 86400
"""Time without use after which compiled kernels are removed: those of other versions of the library."""


@dataclass(frozen=True)
class BuildResult:
    """The loaded kernels and where they come from, or one sentence on why they are unavailable."""

    library: ctypes.CDLL | None
    reason: str = ""
    origin: str = ""
    path: Path | None = None


def library() -> ctypes.CDLL:
    """The kernels.

    Raises:
        RuntimeError: they are not available; the message says why.
    """
    result = build_result()
    if result.library is None:
        raise RuntimeError(result.reason)
    return result.library


def load() -> ctypes.CDLL | None:
    """The kernels, or None; see `unavailable_reason`."""
    return build_result().library


def available() -> bool:
    """Whether the CPU kernels can be used on this machine."""
    return load() is not None


def unavailable_reason() -> str:
    """One sentence on why the CPU kernels cannot be used; empty if they can."""
    return build_result().reason


def build_result() -> BuildResult:
    """The kernels of this process; FORETELL_NATIVE=0 disables them while it is set, FORETELL_ISA names their
    instruction set.

    Raises:
        ValueError: FORETELL_ISA names an instruction set that does not exist or cannot run here.
    """
    if os.environ.get("FORETELL_NATIVE") == "0":
        return BuildResult(None, "The native CPU kernels are switched off by FORETELL_NATIVE=0.")
    return _loaded(instruction_sets.forced())


@functools.cache
def _loaded(forced: instruction_sets.InstructionSet | None) -> BuildResult:
    for entry in [forced] if forced else instruction_sets.usable():
        path = packaged.packaged_kernels(entry.name, SOURCES)
        if path is not None and (library := _open_packaged(path)) is not None:
            return BuildResult(structures.declare_signatures(library), "", f"packaged for {entry.name}", path)
    best = forced or next(iter(instruction_sets.usable()), None)
    built = build(forced.flags if forced else _without_forbidden(), best.name if best else platform.machine())
    if built.library is None:
        log.warning("%s Decoding goes on with PyTorch, which is several times slower.", built.reason)
    return built


def _open_packaged(path: Path) -> ctypes.CDLL | None:
    """A library of the wheel: with torch's OpenMP runtime, which is loaded already, or the system's."""
    library = _open(path)
    if library is None:
        try:
            ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)
        except OSError:
            return None
        library = _open(path)
    return library


def _without_forbidden() -> tuple[str, ...]:
    """Flags that exclude instructions which -march=native includes but the operating system forbids."""
    if "amx_tile" in instruction_sets.processor_features() and not instruction_sets.amx_permitted():
        return ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
    return ()


def build(flags: Sequence[str] = (), name: str = "this processor") -> BuildResult:
    """Load the kernels built with extra flags from the cache directory; compile them if they are not there. name: what
    they are for, in words.
    """
    compiler = find_compiler()
    if compiler is None:
        return BuildResult(
            None,
            "The native CPU kernels need a C++ compiler: none of $CXX, g++, clang++ and c++ was found; install one of "
            "them.",
        )
    result = BuildResult(None)
    for variant in _variants():
        result = _load(compiler, [*FLAGS, *flags, *variant.compile], variant.link, name)
        if result.library is not None:
            return result
    return BuildResult(None, f"The native CPU kernels could not be built with {compiler}: {result.reason}.")


@dataclass(frozen=True)
class _Variant:
    compile: tuple[str, ...]
    link: tuple[str, ...]


def _variants() -> list[_Variant]:
    """Ways to link OpenMP, best first: torch's runtime, the compiler's, none.

    torch loads its own OpenMP runtime with global symbols. Linking without -fopenmp uses it: a second runtime would
    keep a second pool of threads, which spin on the same cores.
    """
    torch_runtime, own_runtime, none = ("-fopenmp",), ("-fopenmp",), ()
    return [_Variant(torch_runtime, ()), _Variant(own_runtime, ("-fopenmp",)), _Variant(none, none)]


def find_compiler() -> str | None:
    """Path of the C++ compiler; None: there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _load(compiler: str, compile_flags: Sequence[str], link_flags: Sequence[str], name: str) -> BuildResult:
    try:
        target = cache_directory() / _library_name(compiler, compile_flags, link_flags)
        if (library := _open_cached(target)) is None:
            cache, target = target.parent, _writable_folder(target.parent) / target.name
            with _locked(target):
                if (library := _open_cached(target)) is None:
                    if target.parent != cache:
                        log.warning(
                            "%s cannot be written: kernels are kept in %s; set XDG_CACHE_HOME.", cache, target.parent
                        )
                    with _announced(name):
                        library = _compile(target, compiler, compile_flags, link_flags)
        origin = f"compiled by {compiler} {' '.join(compile_flags)}"
        return BuildResult(structures.declare_signatures(library), "", origin, target)
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if "error" in line] or ["the compiler failed"]
        return BuildResult(None, lines[0])
    except _InterfaceMismatchError:
        return BuildResult(None, "the compiled library does not have the interface that structures.py describes")
    except (OSError, subprocess.SubprocessError) as error:
        return BuildResult(None, str(error))


@contextlib.contextmanager
def _announced(name: str) -> Iterator[None]:
    """Say on a terminal, else in the log, that kernels are compiled, and for how long."""
    from rich.console import Console  # Seldom needed, and they take time to import.
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    start, console = time.perf_counter(), Console(stderr=True)
    message = f"Compiling kernels for {name} (once)"
    if console.is_terminal:
        columns = TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, refresh_per_second=1, transient=True) as progress:
            progress.add_task(f"{message} ...", total=None)
            yield
    else:
        log.info("%s ...", message)
        yield
    show = console.print if console.is_terminal else log.info
    show(f"Compiled kernels for {name} in {time.perf_counter() - start:.0f} s")


def _writable_folder(cache: Path) -> Path:
    """The folder that kernels are compiled into: the cache, or this user's folder among the temporary files where the
    cache cannot be written.
    """
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if os.access(cache, os.W_OK | os.X_OK):
        return cache
    folder = Path(tempfile.gettempdir(), f"foretell-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{cache} cannot be written, and {folder} can be written by other users; set TMPDIR")
    return folder


class _InterfaceMismatchError(Exception):
    """The compiled library has another interface than structures.py."""


def _open(path: Path) -> ctypes.CDLL | None:
    """The library, or None if the file is damaged or has another interface."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    return library if structures.library_interface(library) == structures.interface() else None


def _open_cached(target: Path) -> ctypes.CDLL | None:
    """The library that an earlier process compiled; None: there is none, or it is damaged."""
    library = _open(target) if target.exists() else None
    if library is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written
            os.utime(target)
    return library


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Of processes that start together one compiles, and the others wait for it.

    Where the file system has no locks each compiles, and the last one replaces an equal file atomically.
    """
    path = target.with_suffix(".lock")
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _library_name(compiler: str, compile_flags: Sequence[str], link_flags: Sequence[str]) -> str:
    """Name of the shared library in its folder: a hash of everything that the build depends on."""
    key = [
        packaged.source_hash(SOURCES),
        structures.interface(),
        compiler,
        *compile_flags,
        "link",
        *link_flags,
        _machine_id(),
    ]
    return f"kernels-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.so"


def _compile(target: Path, compiler: str, compile_flags: Sequence[str], link_flags: Sequence[str]) -> ctypes.CDLL:
    """Compile the library and keep it in the cache directory."""
    remove_unfinished(target.parent)
    for old in kernel_files(target.parent):
        if time.time() - old.stat().st_mtime > _UNUSED_SECONDS:
            old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=unfinished_prefix(), dir=target.parent) as scratch:
        library = Path(scratch, "kernels.so")
        packaged.compile_library(compiler, compile_flags, SOURCES, library, link_flags, _COMPILE_SECONDS)
        # Opened before the move: under the target's name the loader could return an older library that is open already.
        opened = _open(library)
        if opened is None:
            ctypes.CDLL(str(library))
            raise _InterfaceMismatchError
        library.replace(target)
    return opened


def cache_directory() -> Path:
    """The user's cache directory of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell"


def kernel_files(folder: Path | None = None) -> list[Path]:
    """The kernels that were compiled on this machine, by default those in the cache directory; the time of a file is
    that of its last use.
    """
    return sorted(p for p in (folder or cache_directory()).glob("kernels-*.so") if _KERNELS.fullmatch(p.name))


@functools.cache
def packing_key() -> str:
    """A hash of what the layout of packed weights depends on: the kernels, the code that packs, the instructions."""
    files = [*sorted(SOURCES.iterdir()), *sorted(Path(__file__).parent.glob("*.py"))]
    key = [path.read_bytes() for path in files if path.is_file()]
    return hashlib.sha256(repr([*key, library().foretell_instructions()]).encode()).hexdigest()


def _machine_id() -> str:
    """What -march=native depends on: machines of different kinds may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described = dict.fromkeys(
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))
    )
    return "\n".join([platform.machine(), platform.processor(), torch.__version__, *described])
