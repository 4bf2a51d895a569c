"""What every test runs under: one thread, the same generated examples in every run, a folder for temporary files that
is removed at the end, and a cache of packed weights of its own. With FORETELL_CHECK_TYPES=1 the shapes and types of the
package are checked at every call, where beartype is installed; this takes three quarters of the time, so that
`make test` does it for the tests of single parts only.
"""

import os
import tempfile
from importlib.util import find_spec

import hypothesis
import torch
from jaxtyping import install_import_hook

# A run that fails by chance says nothing about the change that it checks. HYPOTHESIS_PROFILE=explore draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Folders of `tmp_path` stay where pytest keeps them for some runs; the others are removed.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_temporary = tempfile.TemporaryDirectory(prefix="foretell-tests-")
tempfile.tempdir = os.environ["TMPDIR"] = _temporary.name

# Packed weights of tests stay out of the user's cache.
os.environ["FORETELL_CACHE"] = f"{_temporary.name}/cache"

if os.environ.get("FORETELL_CHECK_TYPES"):
    install_import_hook("foretell", "typecheck.check" if find_spec("beartype") else None)
torch.set_num_threads(1)
