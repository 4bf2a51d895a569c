"""What stands between the matrix products of a layer: norms and gated activations, one launch each."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float

from foretell.model.triton.launch import Launch

_ROW_WARPS, _ROW_NUMBERS = 16, 512
"""Warps of a program that norms a row, at most, and numbers of a warp."""
_GATED = 1024
"""Numbers of a program that applies an activation."""


@triton.jit
def rms_norm_kernel(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """`x / rms(x) * weight` of one row, in float32."""
    row, at = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = at < D
    value = tl.load(x + row + at, mask=mask, other=0)
    scale = tl.rsqrt(tl.sum(value * value) / D + eps)
    tl.store(
        out + row + at, (value * scale * tl.load(weight + at, mask=mask, other=0)).to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def gated_silu_kernel(projected, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """`silu(gate) * up` of a part of one row `[gate, up]`, each factor rounded to the dtype of the numbers."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(projected + row * 2 * F + at, mask=at < F, other=0)
    up = tl.load(projected + row * 2 * F + F + at, mask=at < F, other=0)
    wide = gate.to(tl.float32)
    left = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    product = left.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * F + at, product.to(gate.dtype), mask=at < F)


def rms_norm(
    x: Float[torch.Tensor, "*t d"], weight: Float[torch.Tensor, " d"], eps: float, dtype: torch.dtype
) -> tuple[Launch, Float[torch.Tensor, "*t d"]]:
    """The launch that norms float32 rows, and its output in `dtype`."""
    x, size = x.contiguous(), x.shape[-1]
    out, block = torch.empty(x.shape, dtype=dtype, device=x.device), triton.next_power_of_2(size)
    arguments = {"x": x, "weight": weight, "out": out, "eps": eps, "D": size, "BLOCK": block}
    warps = min(_ROW_WARPS, max(1, block // _ROW_NUMBERS))
    return Launch(rms_norm_kernel, (x.numel() // size,), arguments, warps), out


def gated_silu(projected: Float[torch.Tensor, "*t p"]) -> tuple[Launch, Float[torch.Tensor, "*t f"]]:
    """The launch that makes `silu(gate) * up` of rows that hold both, one beside the other, and its output."""
    projected, size = projected.contiguous(), projected.shape[-1] // 2
    out = torch.empty(*projected.shape[:-1], size, dtype=projected.dtype, device=projected.device)
    grid = projected.numel() // (2 * size), triton.cdiv(size, _GATED)
    return Launch(gated_silu_kernel, grid, {"projected": projected, "out": out, "F": size, "BLOCK": _GATED}), out
