"""The compiled kernels that a wheel carries: one shared library per instruction set, and the hash of their sources.

Only the standard library is imported: the build of a wheel writes them with `compile_packaged`.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DIRECTORY = Path(__file__).parent / "lib"
"""Where a wheel has the libraries; absent in a source checkout."""
HASH_FILE, OLD_GLIBC = "sources.sha256", "old_glibc.h"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-schedule-insns", "-Wno-psabi")
"""The compiler's flags beside those of an instruction set. Floating-point contraction would change numbers. On aarch64
GCC moves loads up before it assigns registers, unless told not to, and the sums of a tile do not fit beside them."""


def source_hash(sources: Path) -> str:
    """Hash of the kernels' sources in a directory."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    return hashlib.sha256(repr([(file.name, file.read_text()) for file in files]).encode()).hexdigest()


def packaged_kernels(name: str, sources: Path) -> Path | None:
    """The packaged library of an instruction set; None: there is none, or it was made from other sources."""
    path, hash_file = DIRECTORY / f"kernels-{name}.so", DIRECTORY / HASH_FILE
    if not path.exists() or not hash_file.exists() or hash_file.read_text() != source_hash(sources):
        return None
    return path


def compile_library(
    compiler: str,
    compile_flags: Iterable[str],
    sources: Path,
    library: Path,
    link_flags: Iterable[str],
    timeout: float | None = None,
) -> None:
    """Compile the translation units of a directory, all at once, and link them. Objects are written beside the library.

    Raises:
        subprocess.CalledProcessError: the compiler failed; the error has its output.
        OSError, subprocess.SubprocessError: it could not be run, or did not end in `timeout` seconds.
    """

    def run(command: list[str]) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout)

    units = sorted(sources.glob("*.cpp"))
    objects = [str(library.with_suffix(f".{unit.stem}.o")) for unit in units]
    commands = [
        [compiler, *compile_flags, "-c", str(unit), "-o", made] for unit, made in zip(units, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(units)) as threads:
        list(threads.map(run, commands))
    run([compiler, "-shared", *objects, "-o", str(library), *link_flags])
    for made in objects:
        os.unlink(made)


def compile_packaged(
    compiler: str, sets: Iterable[tuple[str, tuple[str, ...]]], sources: Path, out: Path
) -> list[Path]:
    """Compile a library for every (name, flags) and write it to a directory with the hash of the sources.

    OpenMP is not linked: at run time the libraries use the runtime that torch has loaded.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / HASH_FILE).write_text(source_hash(sources))
    old = ["-include", str(sources / OLD_GLIBC)] if (sources / OLD_GLIBC).exists() else []

    def compile_one(entry: tuple[str, tuple[str, ...]]) -> Path:
        name, flags = entry
        library = out / f"kernels-{name}.so"
        compile_library(compiler, [*FLAGS, "-fopenmp", *flags, *old], sources, library, ["-s"])
        return library

    # Every library has threads of its own.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as threads:
        return [out / HASH_FILE, *threads.map(compile_one, sets)]
