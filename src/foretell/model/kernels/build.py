"""Compiles the CPU kernels once per machine and loads them; where that fails it says why and the library does
without.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.model.kernels import structures

SOURCE = Path(__file__).parent / "csrc" / "kernels.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wno-psabi")


@dataclass(frozen=True)
class Outcome:
    """The loaded kernels, or one sentence on why there are none."""

    library: ctypes.CDLL | None
    reason: str


def library() -> ctypes.CDLL:
    """The kernels, ready to be called.

    Raises:
        RuntimeError: they are not available; the message says why.
    """
    found = outcome()
    if found.library is None:
        raise RuntimeError(found.reason)
    return found.library


def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None; `why_not` then says why."""
    return outcome().library


def available() -> bool:
    """Whether the native kernels can be used on this machine."""
    return load() is not None


def why_not() -> str:
    """One sentence on why the native kernels cannot be used; empty if they can."""
    return outcome().reason


def outcome() -> Outcome:
    """The result of building, remembered for the life of the process; none while FORETELL_NATIVE=0 is set."""
    if os.environ.get("FORETELL_NATIVE") == "0":
        return Outcome(None, "The native CPU kernels are switched off by FORETELL_NATIVE=0.")
    return _built()


@functools.cache
def _built() -> Outcome:
    return build()


def build(flags: Sequence[str] = ()) -> Outcome:
    """Compile the kernels with extra flags, unless this machine's cache has them, and load them."""
    compiler = _compiler()
    if compiler is None:
        return Outcome(
            None,
            "The native CPU kernels need a C++ compiler: none of $CXX, g++, clang++ and c++ was found; install one of "
            "them.",
        )
    problem = ""
    for variant in _variants():
        library, problem = _load(compiler, [*FLAGS, *flags, *variant.compile], variant.link)
        if library is not None:
            return Outcome(library, "")
    return Outcome(None, f"The native CPU kernels could not be built with {compiler}: {problem}")


@dataclass(frozen=True)
class _Variant:
    compile: tuple[str, ...]
    link: tuple[str, ...]


def _variants() -> list[_Variant]:
    """Ways to get threads, best first.

    torch brings its own OpenMP runtime and puts its symbols in reach of everyone. Linking without -fopenmp takes
    those: a second runtime would keep a second pool of threads, each spinning on the cores the other needs.
    """
    own, none = _Variant(("-fopenmp",), ("-fopenmp",)), _Variant((), ())
    return [_Variant(("-fopenmp",), ()), own, none]


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _load(compiler: str, compile_flags: Sequence[str], link_flags: Sequence[str]) -> tuple[ctypes.CDLL | None, str]:
    try:
        target = _target(compiler, compile_flags, link_flags)
        if target.exists() and (library := _open(target)) is not None:
            return structures.declare(library), ""
        return _compiled(target, compiler, compile_flags, link_flags), ""
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if "error" in line] or ["the compiler failed"]
        return None, lines[0]
    except _UnlikeError:
        return None, "the compiled library does not have the interface that structures.py describes"
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)


class _UnlikeError(Exception):
    """A library was compiled that does not have the interface that Python expects."""


def _open(path: Path) -> ctypes.CDLL | None:
    """A library, or None where the file is damaged or has another interface."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    return library if structures.reported(library) == structures.interface() else None


def _target(compiler: str, compile_flags: Sequence[str], link_flags: Sequence[str]) -> Path:
    """Path of the shared library in the cache."""
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    key = [*sources, structures.interface(), compiler, *compile_flags, "link", *link_flags, _machine()]
    return _cache() / f"kernels-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.so"


def _compiled(target: Path, compiler: str, compile_flags: Sequence[str], link_flags: Sequence[str]) -> ctypes.CDLL:
    """The library, compiled now and kept in the cache.

    Processes that start together may each compile; whoever is last replaces an equal file in one step.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        object_file, library = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        for command in (
            [compiler, *compile_flags, "-c", str(SOURCE), "-o", str(object_file)],
            [compiler, "-shared", str(object_file), "-o", str(library), *link_flags],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        # Opened under this name: the system remembers an unlike library that was opened under the other one.
        opened = _open(library)
        if opened is None:
            ctypes.CDLL(str(library))
            raise _UnlikeError
        library.replace(target)
    return structures.declare(opened)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell"


def _machine() -> str:
    """What -march=native depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described = dict.fromkeys(
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))
    )
    return "\n".join([platform.machine(), platform.processor(), torch.__version__, *described])
