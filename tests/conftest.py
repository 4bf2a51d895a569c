"""What every test runs under: one thread, and the shapes and types of the package checked at every call."""

import torch
from jaxtyping import install_import_hook

install_import_hook("foretell", "typecheck.check")
torch.set_num_threads(1)
