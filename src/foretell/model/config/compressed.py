"""How a compressed model differs from the architecture that it was: factors of low rank, and a sliced stream."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

Ranks = int | tuple[int, ...]
"""Of all blocks, or one for each."""


@dataclass(frozen=True)
class LowRank:
    """Ranks of the matrices of the blocks that are stored as two factors; 0: the matrix is dense.

    Matrices of the same inputs share the factor that reads these.
    """

    qkv: Ranks = 0
    output: Ranks = 0
    gate_up: Ranks = 0
    down: Ranks = 0

    def __bool__(self) -> bool:
        return bool(self.stored)

    @property
    def stored(self) -> dict[str, Ranks]:
        """The ranks of the matrices that some block stores as two factors, by name."""
        return {name: r for name, r in vars(self).items() if any(r if isinstance(r, tuple) else (r,))}

    def rank(self, name: str, layer: int) -> int:
        """The rank of the matrix of this name in one layer."""
        ranks: Ranks = getattr(self, name)
        return ranks[layer] if isinstance(ranks, tuple) else ranks

    def of_layers(self, layers: Sequence[int]) -> "LowRank":
        """The ranks of a decoder that is made of these layers."""
        return LowRank(*(tuple(r[i] for i in layers) if isinstance(r, tuple) else r for r in astuple(self)))
