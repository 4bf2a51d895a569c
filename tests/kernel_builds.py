"""Builds of the kernels for other instruction sets, which must give the same bits as the one in use."""

import ctypes
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foretell.model.kernels import build, packaged

OTHER_BUILDS = {"portable": ["-O0", "-DFORETELL_PORTABLE"]}
"""Flags by what `foretell_instructions` returns. No optimisation: it takes a fifth of the time to compile."""
if platform.machine() == "x86_64":
    OTHER_BUILDS["avx2"] = ["-O0", "-march=x86-64-v3"]


def other_build(instructions: str) -> ctypes.CDLL:
    """The kernels for other instructions."""
    library = compile_kernels(OTHER_BUILDS[instructions])
    assert library.foretell_instructions().decode() == instructions
    return library


def compile_kernels(flags: Sequence[str]) -> ctypes.CDLL:
    """The kernels compiled with extra flags."""
    found = build.build(flags)
    assert found.library is not None, found.reason
    return found.library


def compile_driver(compiler: str, flags: Sequence[str]) -> Path:
    """`kernel_driver.cpp` compiled for another processor; kept beside the kernels' other builds."""
    source = Path(__file__).parent / "model" / "kernel_driver.cpp"
    key = [packaged.source_hash(build.SOURCES), source.read_text(), compiler, *flags]
    target = build.cache_directory() / f"driver-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            program = Path(scratch, "driver")
            command = [compiler, *packaged.FLAGS, *flags, "-static", f"-I{build.SOURCES}", str(source)]
            subprocess.run([*command, "-o", str(program)], check=True)
            program.replace(target)
    return target
