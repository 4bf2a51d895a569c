"""What every test runs under: one thread, and the shapes and types of the package checked at every call where beartype
is installed.
"""

from importlib.util import find_spec

import torch
from jaxtyping import install_import_hook

install_import_hook("foretell", "typecheck.check" if find_spec("beartype") else None)
torch.set_num_threads(1)
