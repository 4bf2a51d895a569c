"""The names that `import foretell` offers."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import foretell


def test_every_public_name_is_imported_when_it_is_used() -> None:
    assert foretell.__all__ == sorted(foretell.__all__)
    assert set(foretell.__all__) - {"__version__"} == set(foretell._MODULES) <= set(dir(foretell))
    for name, module in foretell._MODULES.items():
        assert getattr(foretell, name) is vars(importlib.import_module(f"foretell.{module}"))[name]
    assert callable(foretell.load) and callable(foretell.catalogue)


def test_the_import_alone_loads_nothing_heavy() -> None:
    code = "import sys, foretell; foretell.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_has_a_reference() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "api.md").read_text("utf-8")
    documented = dict(name.rpartition(".")[::-2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    assert set(foretell.__all__) - {"__version__"} <= set(documented)
    for name, module in documented.items():
        assert getattr(importlib.import_module(module), name).__doc__
