"""Build hooks of the wheels.

With FORETELL_KERNELS=x86_64 or aarch64 the library's wheel carries compiled kernels of that machine type. Without the
variable it is pure Python, and the kernels are compiled at first use. The compiler is $CXX, else g++, or its cross
compiler where the machine type is another one.

With FORETELL_REPOSITORY, the public address of the repository, a wheel names it, and the links of its description lead
there, which are relative ones in the repository's README.
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
from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FORETELL_KERNELS"
REPOSITORY = "FORETELL_REPOSITORY"
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


class AddressHook(MetadataHookInterface):
    """Adds the description, and the project's addresses where the repository has a public one."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        address = os.environ.get(REPOSITORY, "").rstrip("/")
        metadata["urls"] = {}
        if address:
            tree = f"{address}/blob/v{metadata['version']}"
            changes = f"{tree}/CHANGELOG.md"
            metadata["urls"] = {"Repository": address, "Issues": f"{address}/issues", "Changelog": changes}
            text = absolute_links(text, tree)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, tree: str) -> str:
    """Markdown whose links to files of the repository lead to `tree`; pictures to the files themselves."""
    text = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#)", rf"\1{tree}/", text)
    return re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{tree.replace('/blob/', '/raw/', 1)}/", text)


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
