"""Build hook of the wheel: with FORETELL_KERNELS=x86_64 or aarch64 it carries compiled kernels of that machine type.

Without the variable the wheel is pure Python, and the kernels are compiled at first use. The compiler is $CXX, else
g++, or its cross compiler where the machine type is another one.
"""

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "FORETELL_KERNELS"
PLATFORM_TAG = "manylinux_2_28"
"""The oldest C library that the libraries may need; torch's wheels need the same."""
KERNELS = Path("src/foretell/model/kernels")


class KernelsHook(BuildHookInterface):  # type: ignore[misc, type-arg]
    """Compiles the kernels and adds them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile for every instruction set of the machine type, unless the variable is unset."""
        machine = os.environ.get(VARIABLE, "")
        if not machine or version == "editable":
            return
        root = Path(self.root)
        sets, packaged = (_load(root / KERNELS / f"{name}.py") for name in ("instruction_sets", "packaged"))
        flags = [(entry.name, entry.flags) for entry in sets.of_machine(machine)]
        if not flags:
            raise ValueError(f"{VARIABLE}={machine}: kernels are compiled for x86_64 and aarch64")
        self._folder = tempfile.TemporaryDirectory()
        for path in packaged.compile_packaged(
            _compiler(machine), flags, root / KERNELS / "csrc", Path(self._folder.name)
        ):
            _check_c_library(path)
            build_data["force_include"][str(path)] = f"foretell/model/kernels/{packaged.DIRECTORY.name}/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{PLATFORM_TAG}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()


def _compiler(machine: str) -> str:
    cross = f"{machine}-linux-gnu-g++"
    names = [os.environ.get("CXX", ""), "g++" if machine == platform.machine() else cross]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise ValueError(
            f"{VARIABLE}={machine} needs the compiler {names[-1]} (Debian: apt install g++-{machine}-linux-gnu)"
        )
    return found


def _check_c_library(path: Path) -> None:
    """Check that a library runs where wheels with the platform tag are installed."""
    limit = tuple(int(n) for n in PLATFORM_TAG.split("_")[1:])
    needed = {(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())}
    if max(needed, default=limit) > limit:
        raise ValueError(f"{path.name} needs glibc {max(needed)}, but the wheel is tagged {PLATFORM_TAG}")


def _load(path: Path) -> ModuleType:
    """A module of the library by its path: the library itself is not installed while it is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
