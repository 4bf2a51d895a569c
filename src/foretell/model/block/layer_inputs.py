"""Per-layer inputs (Gemma 3n and 4): every layer reads numbers of its own of each token.

They depend on the token alone: they are the sum of a row of a second embedding table and of a projection of the
token's embedding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.activation import gated
from foretell.model.block.linear import Linear, widen
from foretell.model.config.model import Activation

COMBINED = 2.0**-0.5
"""Factor on the sum of both parts."""


class LayerInputs(nn.Module):
    """The inputs of all layers: `table` [vocab, layers * width], `projection` from the residual stream, and the norm of
    what it gives, layer by layer.
    """

    def __init__(self, table: Float[torch.Tensor, "v lw"], projection: Linear, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.table, self.projection, self.norm = nn.Parameter(table, requires_grad=False), projection, norm
        self.width = width

    def forward(
        self, token: Int[torch.Tensor, " t"], embedded: Float[torch.Tensor, "t d"]
    ) -> Float[torch.Tensor, "t l w"]:
        """Of tokens with these embeddings, which are the input of the first layer."""
        rows = widen(F.embedding(token, self.table))
        return combine_inputs(rows, widen(self.projection(embedded)), embedded.shape[-1], self.width, self.norm)


def combine_inputs(
    rows: Float[torch.Tensor, "t lw"],
    projected: Float[torch.Tensor, "t lw"],
    hidden: int,
    width: int,
    norm: Callable[[torch.Tensor], torch.Tensor],
) -> Float[torch.Tensor, "t l w"]:
    """The inputs of all layers from the rows of their table and the projected embeddings, `hidden` numbers each."""
    normed = norm((projected * hidden**-0.5).unflatten(-1, (-1, width)))
    return (normed + rows.unflatten(-1, (-1, width)) * width**0.5) * COMBINED


class LayerInput(nn.Module):
    """What a layer does with its inputs: a gate of the residual stream multiplies them, and the product, projected and
    normed, is added.
    """

    def __init__(self, gate: Linear, projection: Linear, norm: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.gate, self.projection, self.norm, self.activation = gate, projection, norm, activation

    def forward(
        self, x: Float[torch.Tensor, "*t d"], inputs: Float[torch.Tensor, "*t w"]
    ) -> Float[torch.Tensor, "*t d"]:
        """The residual stream after it."""
        out: torch.Tensor = x + self.norm(self.projection(gated(self.gate(x), inputs, self.activation)))
        return out
