"""What every test runs under: one thread, the same generated examples in every run, and the shapes and types of the
package checked at every call where beartype is installed, and a cache of packed weights of its own.
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

# Packed weights of tests stay out of the user's cache.
_cache = tempfile.TemporaryDirectory(prefix="foretell-tests-")
os.environ["FORETELL_CACHE"] = _cache.name

install_import_hook("foretell", "typecheck.check" if find_spec("beartype") else None)
torch.set_num_threads(1)
