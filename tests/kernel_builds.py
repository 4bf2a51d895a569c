"""Builds of the kernels for other instruction sets, which must give the same bits as the one in use."""

import ctypes
import platform
from collections.abc import Sequence

from foretell.model.kernels import build

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
