"""Imports go down only: who may know whom."""

import ast
from pathlib import Path

import foretell

ROOT = Path(foretell.__file__).parent
ORDER = [
    ("names", "validation"),
    ("model.config", "store", "divergence"),
    ("tree",),
    ("model.cache",),
    ("model.native",),
    ("rank",),
    ("sampling",),
    ("context", "text", "config", "suffixes"),
    ("laws", "datastore"),
    ("model", "model.native.decoder"),
    ("draft", "accept"),
    ("shape",),
    ("method", "speculator", "statistics"),
    ("engine", "catalogue"),
    ("api",),
    ("load", "testing", "tune", "corpus"),
    ("train", "train.data"),
    ("train.objective",),
    ("train.recipe",),
    ("train.loop",),
    ("verify", "bench", "roofline"),
    ("cli",),
]
"""From the ground up; rooms of one line may know each other."""


def _room(module: str) -> int | None:
    rooms = [(level, name) for level, names in enumerate(ORDER) for name in names]
    fits = [(len(name), level) for level, name in rooms if module == name or module.startswith(name + ".")]
    return max(fits)[1] if fits else None


def _imports(path: Path) -> set[str]:
    """Foretell modules that a file imports when it is imported itself (not inside functions or for type checking)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("foretell."):
            found.add(node.module.removeprefix("foretell."))
    return found


def test_every_module_has_a_room() -> None:
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert module in ("__init__", "__main__") or _room(module) is not None, module


def test_imports_go_down() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        here = _room(module)
        if here is not None:
            wrong += [f"{module} imports {other}" for other in _imports(path) if (_room(other) or 0) > here]
    assert not wrong, "\n".join(sorted(wrong))


def test_the_analyzer_needs_no_weights() -> None:
    for path in (ROOT / "roofline").rglob("*.py"):
        known = {m for m in _imports(path) if not m.startswith("roofline")}
        assert known <= {"model.config", "names", "validation"}, f"{path.name} imports {known}"
