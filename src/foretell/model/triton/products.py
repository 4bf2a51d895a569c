"""Matrix products whose rows do not depend on each other: the same tiles and order of summation for any number of rows
(He et al., Thinking Machines, 2025). Libraries choose both by the number of rows.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float

from foretell.model.triton.launch import Launch

ROWS, OUTPUTS, INPUTS = 64, 32, 64
"""Tokens, outputs and inputs of a tile: as many rows as the reading of the weights hides, and so few outputs that those
of one layer occupy a GPU.
"""


@triton.jit
def linear_kernel(
    x, weight, bias, out, rows, outputs,
    inputs: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """`x @ weight.T + bias` of the outputs of program 0 and the rows of program 1, summed over rising inputs.

    x: `[rows, inputs]`. weight: `[outputs, inputs]`. out: `[rows, outputs]`.
    """
    first_output, first_row = tl.program_id(0) * OUTPUTS, tl.program_id(1) * ROWS
    output, row, at = tl.arange(0, OUTPUTS), tl.arange(0, ROWS), tl.arange(0, INPUTS)
    x += first_row.to(tl.int64) * inputs
    weight += first_output.to(tl.int64) * inputs
    out += first_row.to(tl.int64) * outputs + first_output
    rows -= first_row
    outputs_left = outputs - first_output
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        inside = at < (inputs - first if inputs % INPUTS else INPUTS)
        mask = (row < rows)[:, None] & inside[None, :]
        left = tl.load(x + row[:, None] * inputs + (first + at)[None, :], mask=mask, other=0)
        mask = (output < outputs_left)[None, :] & inside[:, None]
        right = tl.load(weight + output[None, :] * inputs + (first + at)[:, None], mask=mask, other=0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + first_output + output, mask=output < outputs_left, other=0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (output < outputs_left)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], total.to(out.dtype.element_ty), mask=mask)


def linear(
    x: Float[torch.Tensor, "*t i"], weight: Float[torch.Tensor, "o i"], bias: Float[torch.Tensor, " o"] | None
) -> tuple[Launch, Float[torch.Tensor, "*t o"]]:
    """The launch of a product, and its output in the dtype of `x`."""
    x, (outputs, inputs) = x.contiguous(), weight.shape
    rows = x.numel() // inputs
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": weight if bias is None else bias,
        "out": out,
        "rows": rows,
        "outputs": outputs,
        "inputs": inputs,
        "BIAS": bias is not None,
        "ROWS": ROWS,
        "OUTPUTS": OUTPUTS,
        "INPUTS": INPUTS if x.dtype.itemsize == 2 else INPUTS // 2,
    }
    grid = triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, ROWS)
    return Launch(linear_kernel, grid, arguments, stages=4), out
