"""Per-layer inputs on the CPU kernels; see `foretell.model.block.layer_inputs`."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from foretell.model.block.layer_inputs import combine_inputs
from foretell.model.kernels.embedding import NativeEmbedding
from foretell.model.kernels.linear import NativeLinear
from foretell.model.kernels.row_ops import rms_norm


@dataclass(frozen=True)
class NativeLayerInputs:
    """The inputs of all layers: rows of a table, and a projection of the residual stream with its norm."""

    table: NativeEmbedding
    projection: NativeLinear
    norm: Float[torch.Tensor, " w"]
    eps: float
    mapped: bool = False
    """Whether the table is a view of a file, of which a pass reads a few rows."""

    def __call__(
        self, token: Int[torch.Tensor, " t"], embedded: Float[torch.Tensor, "t d"]
    ) -> Float[torch.Tensor, "t lw"]:
        """Of tokens with these embeddings, layer after layer."""
        rows, projected = self.table(token), self.projection(embedded)
        parts = combine_inputs(rows, projected, embedded.shape[-1], len(self.norm), self._normed)
        return parts.flatten(1).contiguous()

    def _normed(self, x: Float[torch.Tensor, "t l w"]) -> Float[torch.Tensor, "t l w"]:
        return rms_norm(x.flatten(0, 1).contiguous(), self.norm, self.eps).view_as(x)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds beside the file."""
        return int((0 if self.mapped else self.table.nbytes) + self.projection.nbytes + self.norm.nbytes)
