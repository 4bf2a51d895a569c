"""A trained network made fast for drafting on a CPU: its matrices in the form of the native kernels."""

from typing import TypeVar

import torch
from jaxtyping import Float
from torch import nn

from foretell.draft.network.base import Speculator
from foretell.model import native
from foretell.model.native.stack import NativeLinear
from foretell.model.native.structures import Precision

S = TypeVar("S", bound=Speculator)


class Packed(nn.Module):
    """A linear layer on the native kernels; float32 in and out, whatever it holds."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision) -> None:
        super().__init__()
        self._linear = NativeLinear(weight, bias, precision)

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        flat = x.reshape(-1, x.shape[-1]).float().contiguous()
        return self._linear(flat).view(*x.shape[:-1], self._linear.outputs)


def packed(network: S, precision: Precision = "int8") -> S:
    """The network with every `nn.Linear` and its output matrix packed, in place; as it is where the kernels do not run or do not fit its dtype.

    What else it holds computes in float32 then. A packed network drafts; it can be neither trained nor saved. What a matrix makes of a state does not
    depend on how many states share the call.
    """
    head = network.get_buffer("_borrowed_head") if network.head is None else network.head
    if head.device.type != "cpu" or head.dtype == torch.float64 or not native.available():
        return network
    _swap(network, precision)
    for parameter in network.parameters():
        parameter.data = parameter.data.float()
    if not isinstance(network.packed_head, Packed):
        network.packed_head = Packed(head, None, precision)
    return network


def _swap(module: nn.Module, precision: Precision) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Packed(child.weight, child.bias, precision))
        else:
            _swap(child, precision)
