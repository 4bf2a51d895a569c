"""The names that `import foretell` offers."""

import importlib
import subprocess
import sys

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
