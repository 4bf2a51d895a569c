"""Imports go down only: which module may know which, wherever in a file the import stands."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import foretell

ROOT = Path(foretell.__file__).parent
TABLE = Path(__file__).parents[1] / "docs" / "design.md"
"""Its table of packages is the order, from the ground up."""


def _packages() -> list[str]:
    lines = TABLE.read_text("utf-8").partition("| package | content |")[2].partition("\n## ")[0].splitlines()
    return [line.split("`")[1] for line in lines if line.startswith("| `")]


ORDER = [*_packages(), "lab", "model", "__main__"]
"""`lab` and `model` hold no code but in their packages, and the register of `lab`."""


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in ROOT.rglob("*.py")}


def _package(module: str) -> str | None:
    parts = module.split(".")
    longest = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in longest if name in ORDER), None)


def _imports(source: str) -> Iterator[str]:
    """Modules of the package that some code imports: at its head, inside functions, for type checking, in any form."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inside = name.split(".")[1:] if name.split(".")[0] == "foretell" else None
            if inside is not None:
                # What is imported from a module may be a name in it: the longest part that is a module is what gets
                # imported.
                parts = (".".join(inside[:n]) for n in range(len(inside), 0, -1))
                yield next((part for part in parts if part in MODULES), "__init__")


@cache
def _imported(path: Path) -> frozenset[str]:
    return frozenset(_imports(path.read_text("utf-8")))


def test_every_module_has_a_package_and_every_package_a_module() -> None:
    assert [m for m in MODULES if _package(m) is None] == []
    assert [name for name in ORDER if name not in MODULES] == [] and len(set(ORDER)) == len(ORDER)
    rooms = ("lab", "model")
    assert {m for m in MODULES if _package(m) in rooms} == {*rooms, "lab.commands"}, "they have packages of their own"


def test_imports_go_down() -> None:
    up = {
        (module, other)
        for module, path in MODULES.items()
        for other in _imported(path)
        if ORDER.index(_package(other) or "") > ORDER.index(_package(module) or "")
    }
    assert up == set()


def test_only_the_laboratory_imports_the_laboratory() -> None:
    users = {m for m, path in MODULES.items() if any(o.startswith("lab") for o in _imported(path))}
    assert [m for m in users if not m.startswith("lab")] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import foretell.engine.engine", {"engine.engine"}),
        ("import torch, foretell", {"__init__"}),
        ("from foretell import load", {"load"}),
        ("from foretell import Request", {"__init__"}),
        ("from foretell.engine.engine import Engine", {"engine.engine"}),
        ("from foretell.model import kernels, load", {"model.kernels", "model.load"}),
        ("from foretell.model.kernels import decoder as d", {"model.kernels.decoder"}),
        ("def f():\n    if True:\n        from foretell.cli import main", {"cli"}),
        ("if TYPE_CHECKING:\n    from foretell.api import Model", {"api"}),
        ("import foretelling", set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, found: set[str]) -> None:
    assert set(_imports(source)) == found


def test_the_analyzer_needs_no_weights() -> None:
    for module, path in MODULES.items():
        if module.startswith("roofline"):
            known = {m for m in _imported(path) if not m.startswith("roofline")}
            readers = {m for m in known if m.startswith("model.config.readers.")}
            configs = {"model.config.model", "model.config.states", "model.config.families"}
            allowed = configs | {
                "model.load.gguf_header",
                "core.best_tree",
                "utils.assignments",
                "utils.options",
                "utils.names",
                "utils.validation",
            }
            assert known - readers <= allowed, f"{module} imports {known}"


@pytest.mark.parametrize("name", foretell.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(foretell, name) is not None
