"""Parameters and results of the kernels that grow EAGLE-2's dynamic trees (arXiv 2406.16858) in one call."""

import numpy as np
from jaxtyping import Float, Int, UInt64

from foretell.model.kernels import structures

Noise = tuple[UInt64[np.ndarray, "b n"], Float[np.ndarray, " b"], int]
"""Key per request and level, factor per request, and number of candidates; see `core.noise.TargetNoise`."""


class DynamicTrees:
    """Dynamic trees of `b` requests, as `shape.DynamicTree` would grow them; a kernel fills `token`, `parent`, `count`.

    `max_depth`: deepest level of every request, 1 or more. `sizes`: depth, width and budget. `bounds`: least score of a
    node, and of a node that is expanded. `row`, `length`: cache row of every request, and its cached length including
    the root. `noise`: the target's, by which the most probable children of a node are ranked.
    """

    def __init__(
        self,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
        row: Int[np.ndarray, " b"] | None = None,
        length: Int[np.ndarray, " b"] | None = None,
        noise: Noise | None = None,
    ) -> None:
        requests, budget = len(max_depth), sizes[2]
        self.token: Int[np.ndarray, "b n"] = np.zeros((requests, budget), np.int64)
        self.parent: Int[np.ndarray, "b n"] = np.zeros((requests, budget), np.int64)
        """0: the root; else 1 + the index of the parent."""
        self.count: Int[np.ndarray, " b"] = np.zeros(requests, np.int64)
        """Tokens of every request; entries after them are undefined."""
        # Kept alive here: the kernels read them.
        self._arrays = [None if x is None else np.ascontiguousarray(x, np.int64) for x in (max_depth, row, length)]
        self._noise = noise
        self.struct = structures.DynamicTree(
            *(requests, *sizes, *bounds, *(None if x is None else x.ctypes.data for x in self._arrays)),
            *((None, None, 0) if noise is None else (noise[0].ctypes.data, noise[1].ctypes.data, noise[2])),
        )

    def check_result(self, invalid: int, slots: int, context: int) -> None:
        """Check a kernel's return value: -1, or a token outside a cache of `slots` slots or `context` positions.

        Raises:
            ValueError: the trees do not fit.
        """
        if invalid >= 0:
            raise ValueError(
                f"a tree of {self.struct.depth} levels does not fit: the cache has {slots} slots, and positions end at "
                f"{context}"
            )

    @property
    def output_addresses(self) -> tuple[int, int, int]:
        """Addresses that the kernels write to."""
        return self.token.ctypes.data, self.parent.ctypes.data, self.count.ctypes.data
