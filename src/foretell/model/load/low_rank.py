"""Names of factors of low rank in a checkpoint: after SVD-LLM (arXiv 2403.07378), V reads the inputs, U gives the
outputs. Matrices of the same inputs share V.
"""

from collections.abc import Callable, Sequence

import torch

from foretell.model.block.linear import AnyLinear, FactoredLinear, Linear
from foretell.model.config.model import ModelConfig

FACTORS = {
    "qkv": "self_attn.qkv_v_proj",
    "output": "self_attn.o_v_proj",
    "gate_up": "mlp.gate_up_v_proj",
    "down": "mlp.down_v_proj",
}
"""Name of V by the matrices that it belongs to."""
SHORTCUTS = "attention_shortcut", "mlp_shortcut"
"""Names of the matrices that a sliced residual stream is multiplied with."""
Part = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


def outer_name(name: str) -> str:
    """The name of U of a matrix: of `self_attn.q_proj` `self_attn.q_u_proj`."""
    return name.removesuffix("_proj") + "_u_proj"


def read_linear(
    config: ModelConfig,
    role: str,
    rows: Sequence[tuple[str, int]],
    inputs: int,
    read: Callable[[str, int, int, bool], Part],
    bias: bool,
    stack: Callable[..., Linear],
) -> AnyLinear:
    """The matrices `rows`, names and outputs, below each other, as the checkpoint has them: dense or in factors."""
    rank = getattr(config.low_rank, role)
    if not rank:
        return stack(*(read(name, outputs, inputs, bias) for name, outputs in rows))
    outer = stack(*(read(outer_name(name), outputs, rank, bias) for name, outputs in rows))
    return FactoredLinear(stack(read(FACTORS[role], rank, inputs, False)), outer)
