"""SVD-LLM's update after truncation (Wang et al., arXiv 2403.07378): outer factors A are fitted again, by least squares
of ||W x - A B x'||, with x the inputs in the source and x' those in the compressed model.
"""

from contextlib import ExitStack

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import linears, matrices
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.linear import FactoredLinear
from foretell.model.block.rope import RopeTables
from foretell.model.config.model import ModelConfig
from foretell.model.training.full_forward import forward_blocks

Tensor = torch.Tensor
_DAMPING = 1e-4
"""Of the step from the truncated factor, as a share of the mean square of what it reads."""


def refit(
    factor: Float[Tensor, "o r"], read: Float[Tensor, "t r"], error: Float[Tensor, "t o"]
) -> Float[Tensor, "o r"]:
    """The factor whose outputs for what it reads have the least squared error, if they have this one so far; few steps
    are taken in directions that are hardly read.
    """
    moment = (read.T @ read).double()
    damping = _DAMPING * moment.diagonal().mean().clamp_min(1e-30)
    damped = moment + damping * torch.eye(len(moment), dtype=moment.dtype)
    step = torch.linalg.solve(damped, (read.T @ error).double())
    return factor + step.T.to(factor.dtype)


def refit_block(
    config: ModelConfig,
    ropes: tuple[RopeTables, RopeTables],
    i: int,
    source: DecoderBlock,
    block: DecoderBlock,
    streams: Float[Tensor, "n s d"],
    dtype: torch.dtype,
) -> Float[Tensor, "n s d"]:
    """Fit the outer factors of block `i` again, in place, each before it runs, their numbers in `dtype`; returns the
    streams after the block. `streams`: the inputs of the block in the source, and after them in the compressed model.
    """
    in_source, in_compressed = streams.chunk(2)
    wanted = dict[str, Tensor]()
    with ExitStack() as hooks, torch.inference_mode():
        for role, linear in linears(source).items():
            hook = linear.register_forward_hook(lambda _, inputs, out, role=role: wanted.update({role: out}))
            hooks.callback(hook.remove)
        for role, matrix in matrices(block).items():
            if isinstance(matrix, FactoredLinear):
                hook = matrix.register_forward_pre_hook(
                    lambda module, inputs, role=role: _refit_matrix(module, inputs[0], wanted[role], dtype)
                )
                hooks.callback(hook.remove)
        pairs = ((source, in_source), (block, in_compressed))
        return torch.cat([forward_blocks([each], config, ropes, x, i) for each, x in pairs])


def _refit_matrix(
    matrix: FactoredLinear, x: Float[Tensor, "b s i"], wanted: Float[Tensor, "b s o"], dtype: torch.dtype
) -> None:
    read = matrix.inner(x)
    error = wanted - matrix.outer(read)
    outer = matrix.outer.weight
    outer.data = refit(outer.data, read.flatten(0, -2), error.flatten(0, -2)).to(dtype).float()
