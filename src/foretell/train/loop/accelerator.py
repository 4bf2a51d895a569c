"""The processes and devices of a training."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


def create_accelerator() -> "Accelerator":
    """What `accelerate launch`, `torchrun` or a single process gives a training.

    Raises:
        ValueError: accelerate is not installed.
    """
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ValueError("training needs accelerate; run: pip install 'foretell[train]'") from error
    # Some recipes leave out parameters in some steps; the target's embedding is a constant buffer.
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
    # Without this, several processes without a GPU do not form a group.
    cpu = not torch.cuda.is_available()
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[kwargs])
