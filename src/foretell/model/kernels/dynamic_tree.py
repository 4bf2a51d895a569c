"""Parameters and results of the kernels that grow EAGLE-2's dynamic trees (arXiv 2406.16858) in one call."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64

from foretell.model.kernels import numbers, structures


class Noise(NamedTuple):
    """How the target samples: per request its parameters, with the inverse temperature 0 where it does not, and the key
    of the noise at each level below the root.
    """

    sampling: ctypes.Array[structures.Sampling]
    key: UInt64[np.ndarray, "b n"]


@dataclass(frozen=True)
class NodeLimits:
    """Least confidence in a node for it to be added, and to be expanded: its probability given its parent, or with
    `margin` the difference of the two largest probabilities after its parent.
    """

    least: float = 0.0
    least_expanded: float = 0.0
    margin: bool = False


NO_LIMITS = NodeLimits()
_NO_OUTPUTS = torch.empty(0, 0)


class DynamicTrees:
    """Dynamic trees of `b` requests, as `shape.DynamicTree` would grow them; a kernel fills `token`, `parent`,
    `score` and `count`.

    `max_depth`: deepest level of every request, 1 or more. `sizes`: depth, width and budget. `bounds`: least score of a
    node, and of a node that is expanded. `row`, `length`: cache row of every request, and its cached length including
    the root. `noise`: the target's, by which the children of a node are ranked. `limits`: of nodes.
    `hidden`: width of the outputs of the nodes that ran; 0: `outputs`, `output_row` and `confidence` are not set.
    """

    def __init__(
        self,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
        row: Int[np.ndarray, " b"] | Sequence[int] | None = None,
        length: Int[np.ndarray, " b"] | Sequence[int] | None = None,
        noise: Noise | None = None,
        limits: NodeLimits = NO_LIMITS,
        hidden: int = 0,
    ) -> None:
        b, n = len(max_depth), sizes[2] + 1
        # One block of memory: an array's address takes longer to find than the array to make.
        work, at = numbers.zeros(4 * b + 5 * b * n)
        inputs, nodes = work[: 3 * b].reshape(3, b), work[4 * b :].reshape(5, b, n)
        inputs[0] = max_depth
        if row is not None and length is not None:
            inputs[1], inputs[2] = row, length
        self.count: Int[np.ndarray, " b"] = work[3 * b : 4 * b]
        """Nodes of every request below its root."""
        self.token: Int[np.ndarray, "b n"] = nodes[0]
        """The root's is not set; 0 after the last node."""
        self.parent: Int[np.ndarray, "b n"] = nodes[1]
        """-1 for the root and after the last node."""
        self.score: Float[np.ndarray, "b n"] = nodes[2].view(np.float64)
        """Product of the drafter's probabilities along the path; 0 after the last node."""
        self.output_row: Int[np.ndarray, "b n"] = nodes[3]
        """Row of every node in `outputs`; -1: it was not run."""
        self.confidence: Float[np.ndarray, "b n"] = nodes[4].view(np.float64)
        """In every node; the root's is 1."""
        self.outputs: Float[torch.Tensor, "k d"] = _NO_OUTPUTS
        """Outputs of the layers, the roots' first."""
        if hidden:
            self.outputs = torch.empty(b * (1 + sizes[0] * sizes[1]), hidden)
        sampling, keys = (None, None) if noise is None else noise
        self._inputs = work, keys, sampling  # Kept alive here: the kernels read them.
        first, size = at + 32 * b, 8 * b * n
        self.struct = structures.DynamicTree(
            requests=b,
            depth=sizes[0],
            width=sizes[1],
            budget=sizes[2],
            min_score=bounds[0],
            min_expand_score=bounds[1],
            max_depth=at,
            row=None if row is None else at + 8 * b,
            length=None if row is None else at + 16 * b,
            sampling=sampling and ctypes.addressof(sampling),
            noise=None if keys is None else keys.ctypes.data,
            min_confidence=limits.least,
            min_expand_confidence=limits.least_expanded,
            margin=limits.margin,
            outputs=self.outputs.data_ptr() if hidden else None,
            output_row=first + 3 * size if hidden else None,
            confidence=first + 4 * size if hidden else None,
            token=first,
            parent=first + size,
            sizes=at + 24 * b,
            score=first + 2 * size,
        )

    def check_result(self, invalid: int, context: int) -> None:
        """Check a kernel's return value: -1, or a token outside its row's blocks or `context` positions.

        Raises:
            ValueError: the trees do not fit.
        """
        if invalid >= 0:
            raise ValueError(
                f"a tree of {self.struct.depth} levels does not fit in the blocks of its row, or in {context} positions"
            )
