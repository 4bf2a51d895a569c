"""Trees by confidence that the kernels grow in one call."""

import numpy as np
from jaxtyping import Int

from foretell.model.kernels import structures


class Trees:
    """What `shape.Beam` would grow for each of `b` texts: asked for, and written by a kernel.

    `max_depth`: tokens that every text has room for, 1 or more. `sizes`: depth, width and budget. `bounds`: the least
    score of a node, and that of one to be gone on from. `row`, `length`: where the keys of every text are, and how
    many, the root's included.
    """

    def __init__(
        self,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
        row: Int[np.ndarray, " b"] | None = None,
        length: Int[np.ndarray, " b"] | None = None,
    ) -> None:
        texts, budget = len(max_depth), sizes[2]
        self.token: Int[np.ndarray, "b n"] = np.zeros((texts, budget), np.int64)
        self.parent: Int[np.ndarray, "b n"] = np.zeros((texts, budget), np.int64)
        """Places of parents: the root's is 0, the first token's 1."""
        self.count: Int[np.ndarray, " b"] = np.zeros(texts, np.int64)
        """Tokens of every text; what stands behind them means nothing."""
        # Kept here: the kernels read them.
        self._given = [None if x is None else np.ascontiguousarray(x, np.int64) for x in (max_depth, row, length)]
        self.struct = structures.Beam(
            texts, *sizes, *bounds, *(None if x is None else x.ctypes.data for x in self._given)
        )

    def check(self, bad: int, slots: int, context: int) -> None:
        """See what a kernel found wrong: a token that it could not place in a cache of `slots` or at a position below
        `context`, or nothing (-1).

        Raises:
            ValueError: the trees do not fit.
        """
        if bad >= 0:
            raise ValueError(
                f"a tree of {self.struct.depth} levels does not fit: the cache has {slots} slots, and positions end at "
                f"{context}"
            )

    @property
    def out(self) -> tuple[int, int, int]:
        """Where the kernels write."""
        return self.token.ctypes.data, self.parent.ctypes.data, self.count.ctypes.data
