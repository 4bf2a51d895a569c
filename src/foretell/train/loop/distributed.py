"""Distribution of a module over the processes that train it: copies (DDP) or shards (FSDP)."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from accelerate import Accelerator

OptimizerFactory = Callable[[], torch.optim.Optimizer]
"""Makes the optimizer of the module's current parameters."""


class DistributedStrategy(ABC):
    """A module and its optimizer, prepared for all processes."""

    module: nn.Module
    optimizer: Any
    """Accelerate's wrapper of the optimizer."""
    sharded: bool
    """Each process holds a part of every weight."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[object]:
        """Context in which gradients are accumulated without being exchanged."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradient; returns its norm before."""

    @abstractmethod
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's unsharded state on the main process. All processes must call it."""


def create_strategy(
    accelerator: "Accelerator", module: nn.Module, make_optimizer: OptimizerFactory
) -> DistributedStrategy:
    """The strategy that the launcher asks for."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "MULTI_CPU" and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return _CPUShardedStrategy(accelerator, module, make_optimizer)
    return _AccelerateStrategy(accelerator, module, make_optimizer, kind == "FSDP")


class _AccelerateStrategy(DistributedStrategy):
    """A single process, DDP, or FSDP on GPUs."""

    def __init__(
        self, accelerator: "Accelerator", module: nn.Module, make_optimizer: OptimizerFactory, sharded: bool
    ) -> None:
        self._accelerator, self.sharded = accelerator, sharded
        self.module, self.optimizer = accelerator.prepare(module, make_optimizer())

    def no_sync(self) -> AbstractContextManager[object]:
        out: AbstractContextManager[object] = self._accelerator.no_sync(self.module)
        return out

    def clip_grad_norm(self, max_norm: float) -> float:
        return float(self._accelerator.clip_grad_norm_(self.module.parameters(), max_norm))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = self._accelerator.get_state_dict(self.module)
        return out


class _CPUShardedStrategy(DistributedStrategy):
    """FSDP on processes without GPUs, which accelerate does not support."""

    sharded = True

    def __init__(self, accelerator: "Accelerator", module: nn.Module, make_optimizer: OptimizerFactory) -> None:
        # On CPUs nothing is gained by freeing the gathered weights between forward and backward.
        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self.module = module
        self.optimizer = accelerator.prepare(make_optimizer())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def clip_grad_norm(self, max_norm: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.module, options=options)
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
