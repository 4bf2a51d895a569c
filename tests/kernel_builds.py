"""Builds of the kernels for other instruction sets, which must give the same bits as the one in use."""

import ctypes
import platform

from foretell.model.kernels import build

OTHER_BUILDS = {"portable": ["-O1", "-DFORETELL_PORTABLE"]}
"""Flags by what `foretell_instructions` returns."""
if platform.machine() == "x86_64":
    OTHER_BUILDS["avx2"] = ["-O1", "-march=x86-64-v3"]


def other_build(instructions: str) -> ctypes.CDLL:
    """The kernels for other instructions, compiled with little optimisation, which takes less time."""
    found = build.build(OTHER_BUILDS[instructions])
    assert found.library is not None, found.reason
    assert found.library.foretell_instructions().decode() == instructions
    return found.library
