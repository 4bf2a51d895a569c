"""What a family of architectures is: what distinguishes it from Llama, in one value per family.

Names are those of Llama's checkpoints (`foretell.model.block.spec` has them) unless a family gives others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Int

from foretell.model.config.model import ModelConfig


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix in a checkpoint, and of its bias."""

    name: str
    """Of the matrix in its block, without `.weight`."""
    outputs: int
    """Rows that the checkpoint has."""
    chosen: Int[torch.Tensor, " n"] | None = None
    """Those that are read, in this order; None: all."""

    def __len__(self) -> int:
        """Rows that are read."""
        return self.outputs if self.chosen is None else len(self.chosen)


RowsOf = Callable[[ModelConfig, int], list[Rows] | None]
"""`(config, layer)` to the rows of a linear layer, one below the other; None: as in Llama."""
ExpertStorage = Literal["each", "stacked", "transposed", "alternating"]
"""How a checkpoint of safetensors stores the experts of a layer: one tensor for each matrix; all experts in one tensor,
the rows of gate before those of up; the same with inputs as rows; or rows of gate and up in turns.
"""


@dataclass(frozen=True)
class Family:
    """What is peculiar to a family of architectures."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules of a block that differ from Llama's, or what names begin with; `{}` is the number of an expert.
    """
    rows: Mapping[str, RowsOf] = field(default_factory=dict)
    """Linear layers whose rows the checkpoint stores otherwise, by their field of `BlockWeights`: as `mlp.gate_up`."""
    experts: ExpertStorage = "each"
    stacked_names: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """Names of the tensors of all experts of a layer."""
    final_norm: str = "model.norm"

    def name(self, name: str) -> str:
        """The name in a block of the tensor that Llama calls `name`."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            own = self.names.get(".".join(parts[:count]))
            if own is not None:
                return ".".join([own, *parts[count:]])
        return name


LLAMA = Family()
