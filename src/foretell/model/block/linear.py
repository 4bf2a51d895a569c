"""Linear layers: in a float dtype, and int8 weights times int8 activations (W8A8)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import nn

from foretell.model.block.spec import LINEARS
from foretell.model.matrices.hadamard import hadamard_matrix
from foretell.model.triton import batch_invariant, run, runs_kernels

INT8_BLOCK = 64
"""Inputs that are rotated together. The CPU kernels use the same arithmetic and the same sizes."""
INT8_GROUP = 192
"""Inputs that share a scale."""
_KEPT = {path.rpartition(".")[2] for path, spec in LINEARS.items() if spec.narrowest != "blocks"}
"""Modules that are not quantised."""


def widen(x: Float[torch.Tensor, "*any"]) -> Float[torch.Tensor, "*any"]:
    """`x` in float32, or unchanged if it is float64: the dtype of norms, softmaxes and logits."""
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
        x = x.to(weight.dtype) if x.dtype.itemsize > weight.dtype.itemsize else x
        if x.dtype == weight.dtype != torch.float64 and batch_invariant() and runs_kernels(x):
            from foretell.model.triton import products

            return run(products.linear(x, weight, self.bias))
        return F.linear(x, weight, self.bias)


class FactoredLinear(nn.Module):
    """A matrix of low rank as two factors: `outer(inner(x))`."""

    def __init__(self, inner: Linear, outer: Linear) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        out: torch.Tensor = self.outer(self.inner(x))
        return out

    @property
    def weight(self) -> Float[torch.Tensor, "o i"]:
        """The product of the factors."""
        return self.outer.weight @ self.inner.weight

    @property
    def bias(self) -> Float[torch.Tensor, " o"] | None:
        """The bias of the outputs."""
        return self.outer.bias


AnyLinear = Linear | FactoredLinear
"""A linear layer in floats."""


class Int8Linear(nn.Module):
    """Int8 weights times int8 activations, float32 in and out: the arithmetic of the CPU kernels in torch.

    Weights and activations are rotated by a Hadamard matrix over blocks of inputs, which spreads outliers (QuaRot,
    arXiv 2404.00456), and rounded symmetrically with one scale per output or token and group of inputs. Sums within a
    group are exact.
    """

    weight: Int8[torch.Tensor, "g o 192"]
    scale: Float[torch.Tensor, "g o"]

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        levels, scale = rotate_and_round(linear.weight.detach())
        self.register_buffer("weight", levels.transpose(0, 1).to(torch.int8).contiguous())
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Float[torch.Tensor, "*t i"]) -> Float[torch.Tensor, "*t o"]:
        """Apply to the last axis."""
        levels, scale = rotate_and_round(x.reshape(-1, x.shape[-1]))
        levels, scale = levels.transpose(0, 1), scale.T[:, :, None]
        if x.device.type == "cpu":
            out = scale.new_zeros(levels.shape[1], self.scale.shape[1])
            rows = levels.to(torch.int8).contiguous()
            for i, (row, weight) in enumerate(zip(rows, self.weight, strict=True)):
                out.addcmul_(torch._int_mm(row, weight.T) * self.scale[i], scale[i])
        else:
            out = (levels @ self.weight.float().transpose(1, 2) * (scale * self.scale[:, None])).sum(0)
        return (out if self.bias is None else out + self.bias.float()).view(*x.shape[:-1], -1)


def rotate_and_round(
    x: Float[torch.Tensor, "t i"],
) -> tuple[Float[torch.Tensor, "t g 192"], Float[torch.Tensor, "t g"]]:
    """Integers in -127 .. 127 and scales whose products approximate the rotated rows, padded to whole groups."""
    padded = F.pad(x.float(), (0, -x.shape[-1] % INT8_GROUP))
    groups = (padded.view(-1, INT8_BLOCK) @ hadamard_matrix(INT8_BLOCK, x.device)).view(len(x), -1, INT8_GROUP)
    scale = (groups.abs().amax(-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (groups / scale[..., None]).round(), scale


def quantize_int8(module: nn.Module) -> None:
    """Replace every `Linear` within `module` by an `Int8Linear`, in place; routers stay."""
    for name, child in module.named_children():
        if not isinstance(child, Linear):
            quantize_int8(child)
        elif name not in _KEPT:
            setattr(module, name, Int8Linear(child))
