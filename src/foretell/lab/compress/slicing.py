"""SliceGPT (Ashkboos et al., arXiv 2401.15024): the residual stream is rotated to its principal axes and cut.

RMSNorm without weights commutes with rotations. So before each norm the stream, of `d` numbers, may be in a basis of
its own: matrices that read the normed stream are multiplied by the basis Q, those that write to it by Q^T, and where
the basis changes, the stream by a shortcut Q_next^T Q. Without a cut the model computes the same; with one, only the
`kept` axes of largest variance of the normed stream are left, and every matrix shrinks.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import linears, set_matrix
from foretell.lab.quantize.calibration import run_block
from foretell.model.block.layer import DecoderBlock, RMSNorm
from foretell.model.block.linear import Linear
from foretell.model.block.rope import RopeTables
from foretell.model.config.model import ModelConfig

Tensor = torch.Tensor
_STEP = 8
"""Widths are multiples of it, as in the paper's code."""


def kept_width(config: ModelConfig, sparsity: float, source: str) -> int:
    """Numbers of the residual stream that are left.

    Raises:
        ValueError: none are left, or the model's norms do not commute with rotations.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"--sparsity {sparsity:g}: slicegpt deletes a share of the hidden size that is 0 to below 1")
    if config.post_norms or config.parallel_blocks:
        raise ValueError(
            f"{source}: slicegpt rotates the residual stream, and {config.architecture} norms the outputs of attention "
            "and feed-forward with weights, or adds both at once, which no rotation leaves as they are; use another "
            "method"
        )
    return max(_STEP, round(config.hidden * (1 - sparsity) / _STEP) * _STEP)


def sliced_config(config: ModelConfig, kept: int) -> ModelConfig:
    """The configuration of the sliced model. Its norms take the mean over `kept` numbers in place of `hidden`."""
    eps = config.norm_eps * config.hidden / kept
    return replace(config, hidden=kept, norm_eps=eps, tied=False, shortcuts=True)


@dataclass(frozen=True)
class SlicedBlock:
    """A sliced block, its output before it was sliced, and the bases of the stream before and after it."""

    block: DecoderBlock
    output: Float[Tensor, "b s d"]
    before: Float[Tensor, "d k"]
    after: Float[Tensor, "d k"]


def slice_block(
    config: ModelConfig,
    ropes: tuple[RopeTables, RopeTables],
    i: int,
    block: DecoderBlock,
    x: Float[Tensor, "b s d"],
    kept: int,
) -> SlicedBlock:
    """Slice block `i`, in place, by what its residual stream is on calibration sequences with the input `x`."""
    between = list[Tensor]()
    hook = block.mlp_norm.register_forward_pre_hook(lambda _, inputs: between.append(inputs[0]))
    output = run_block(config, ropes, i, block, x)
    hook.remove()
    before, middle, after = (principal_axes(s, kept) for s in (x, torch.cat(between), output))
    matrices = linears(block)
    pairs = (("qkv", block.attention_norm, before), ("gate_up", block.mlp_norm, middle))
    for reader, norm, basis in pairs:
        set_matrix(block, reader, _reading(matrices[reader], norm, basis))  # type: ignore[index,arg-type]
    set_matrix(block, "output", _writing(matrices["output"], middle))
    set_matrix(block, "down", _writing(matrices["down"], after))
    block.attention_norm, block.mlp_norm = sliced_norm(config, kept), sliced_norm(config, kept)
    block.attention_shortcut = Linear((middle.T @ before).float())
    block.mlp_shortcut = Linear((after.T @ middle).float())
    return SlicedBlock(block, output, before, after)


def principal_axes(x: Float[Tensor, "*t d"], kept: int) -> Float[Tensor, "d k"]:
    """The axes of largest second moment of the normed stream, the largest first, in float64."""
    flat = x.flatten(0, -2).double()
    normed = flat * flat.square().mean(-1, keepdim=True).clamp_min(1e-30).rsqrt()
    axes: Tensor = torch.linalg.eigh(normed.T @ normed).eigenvectors
    return axes.flip(1)[:, :kept]


def rotate_rows(
    rows: Float[Tensor, "v d"], basis: Float[Tensor, "d k"], norm: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "v k"]:
    """Rows that read the stream, or are read into it, in a basis; `norm`: weights that multiply what they read."""
    wide = rows.double() if norm is None else rows.double() * norm.double()
    return (wide @ basis).float()


def sliced_norm(config: ModelConfig, kept: int) -> RMSNorm:
    """A norm whose result is that of the mean over `hidden` numbers, of which all but `kept` are zero."""
    ratio = config.hidden / kept
    return RMSNorm(torch.full((kept,), ratio**0.5), config.norm_eps * ratio)


def _reading(linear: Linear, norm: RMSNorm, basis: Float[Tensor, "d k"]) -> Linear:
    return Linear(rotate_rows(linear.weight.data, basis, norm.weight.data), linear.bias)


def _writing(linear: Linear, basis: Float[Tensor, "d k"]) -> Linear:
    bias = None if linear.bias is None else (basis.T @ linear.bias.data.double()).float()
    return Linear((basis.T @ linear.weight.data.double()).float(), bias)
