"""Activations of feed-forward networks."""

import torch
import torch.nn.functional as F
from jaxtyping import Float

from foretell.model.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from foretell.model.triton import run, runs_kernels


def activated(projected: Float[torch.Tensor, "*t p"], kind: Activation) -> Float[torch.Tensor, "*t f"]:
    """The input of the last matrix of a feed-forward network, from the product with gate and up, one beside the other,
    or with up alone where the activation has no gate.
    """
    if kind == "relu2":
        return F.relu(projected).square()
    if kind == "silu" and projected.dtype != torch.float64 and runs_kernels(projected):
        from foretell.model.triton import elementwise

        return run(elementwise.gated_silu(projected))
    gate, up = projected.chunk(2, -1)
    return gated(gate, up, kind)


def gated(
    gate: Float[torch.Tensor, "*t f"], up: Float[torch.Tensor, "*t f"], kind: Activation
) -> Float[torch.Tensor, "*t f"]:
    """The two factors of a gated feed-forward network in one: `activation(gate) * up` (Shazeer, arXiv 2002.05202)."""
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "relu":
        return F.relu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
