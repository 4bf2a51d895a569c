"""What every test runs under: one thread, and the shapes and types of the package checked at every call."""

from importlib.util import find_spec
from pathlib import Path

import torch
from jaxtyping import install_import_hook


def checked_modules() -> list[str]:
    """Every module of the package but the native kernels', whose structural protocols cannot be checked at run time."""
    spec = find_spec("foretell")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    files = (f.relative_to(package.parent) for f in package.rglob("*.py"))
    return [".".join(f.with_suffix("").parts) for f in files if f.name != "__init__.py" and "native" not in f.parts]


install_import_hook(checked_modules(), "typecheck.check")
torch.set_num_threads(1)
