"""Matrices of the network: dense, or eight-bit integers with a scale per output."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import nn


def widen(x: Float[torch.Tensor, "*any"]) -> Float[torch.Tensor, "*any"]:
    """`x` in float32, or as it is where it is wider: what norms, softmaxes and logits are computed in."""
    return x if x.dtype == torch.float64 else x.float()


class Linear(nn.Module):
    """`x @ weight.T + bias` with weight `[out, in]`."""

    def __init__(self, weight: Float[torch.Tensor, "o i"], bias: Float[torch.Tensor, " o"] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis; a wider input is rounded to the weight's dtype first."""
        weight = self.weight
        return F.linear(x.to(weight.dtype) if x.dtype.itemsize > weight.dtype.itemsize else x, weight, self.bias)


class Int8Linear(nn.Module):
    """Weight-only eight-bit quantisation, symmetric, one scale per output; arithmetic in the activations' dtype."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        scale = linear.weight.float().abs().amax(-1).clamp_min(1e-12) / 127
        self.register_buffer("weight", (linear.weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        out = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return out if self.bias is None else out + self.bias


def quantize(module: nn.Module) -> None:
    """Replace every `Linear` below `module` by its eight-bit form, in place."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, Int8Linear(child))
        else:
            quantize(child)
