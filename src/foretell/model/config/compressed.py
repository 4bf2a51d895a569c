"""How a compressed model differs from the architecture that it was: factors of low rank, and a sliced stream."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class LowRank:
    """Ranks of the matrices of all blocks that are stored as two factors; 0: the matrix is dense.

    Matrices of the same inputs share the factor that reads these.
    """

    qkv: int = 0
    output: int = 0
    gate_up: int = 0
    down: int = 0

    def __bool__(self) -> bool:
        return any(astuple(self))
