"""Changes the matrices of a checkpoint before they are packed: floats to four bits, and blocks to floats."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from foretell.model.config.model import ModelConfig
from foretell.model.kernels import build
from foretell.model.kernels.structures import PANEL_KINDS
from foretell.model.load.weights import DelegatedWeights, Weights
from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.model.matrices.stored import FLOAT_KINDS, Matrix, StoredMatrix

log = logging.getLogger(__name__)
_ROWS = 256
"""Rows that a thread rounds at a time."""


def round_to_blocks(matrix: StoredMatrix, kind: Kind) -> StoredMatrix:
    """A matrix of floats rounded to the nearest in blocks of 32: Q4_1 (a scale and a minimum) or Q8_0 (a scale).

    Raises:
        ValueError: the rows are no whole blocks.
    """
    per_block, size = BLOCKS[kind]
    if matrix.inputs % per_block:
        raise ValueError(f"{kind} needs rows of whole blocks of {per_block}, found {matrix.inputs} inputs")
    kernels, row_type = build.library(), list(FLOAT_KINDS).index(matrix.kind)
    out = torch.empty(matrix.outputs, matrix.inputs // per_block * size, dtype=torch.uint8)

    def round_rows(first: int) -> None:
        rows = np.arange(first, min(first + _ROWS, matrix.outputs), dtype=np.uint64)
        address = matrix.data.data_ptr() + rows * np.uint64(matrix.data.stride(0))
        kernels.foretell_round_rows(
            PANEL_KINDS.index(kind), row_type, address.ctypes.data, len(rows), matrix.inputs, out[first:].data_ptr()
        )

    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as pool:
        list(pool.map(round_rows, range(0, matrix.outputs, _ROWS)))
    return StoredMatrix(kind, matrix.inputs, out)


class RoundedWeights(DelegatedWeights):
    """A checkpoint whose matrices in blocks become Q4_1 and whose head becomes Q8_0; the embedding stays as it is.

    Matrices whose rows are no multiple of 32 stay as they are, with a message.
    """

    storage = "quantized"

    def __init__(self, inner: Weights) -> None:
        super().__init__(inner)
        self.variant = "int4"
        self._kept = set[str]()

    def round_matrix(self, name: str, matrix: Matrix) -> StoredMatrix:
        """A matrix of a block, rounded."""
        return self._rounded(name, matrix if isinstance(matrix, StoredMatrix) else StoredMatrix.of(matrix), "Q4_1")

    def output_matrix(self, config: ModelConfig) -> StoredMatrix:
        """The head, rounded to eight bits."""
        return self._rounded("lm_head.weight", self._inner.output_matrix(config), "Q8_0")

    def _rounded(self, name: str, matrix: StoredMatrix, kind: Kind) -> StoredMatrix:
        if matrix.quantized:
            return matrix
        if matrix.inputs % BLOCKS[kind][0] == 0:
            return round_to_blocks(matrix, kind)
        if name not in self._kept:
            self._kept.add(name)
            log.warning("%s stays in bfloat16: %d inputs are no multiple of 32", name, matrix.inputs)
        return matrix


class WidenedWeights(DelegatedWeights):
    """A checkpoint whose quantised matrices are packed as floats; the embedding stays as it is."""

    def __init__(self, inner: Weights) -> None:
        super().__init__(inner)
        self.variant = f"{inner.variant} widened".strip()

    def round_matrix(self, name: str, matrix: Matrix) -> Matrix:
        """A matrix of a block, to be packed as floats."""
        changed = self._inner.round_matrix(name, matrix)
        return replace(changed, as_floats=True) if isinstance(changed, StoredMatrix) else changed

    def output_matrix(self, config: ModelConfig) -> StoredMatrix:
        """The head, to be packed as floats."""
        return replace(self._inner.output_matrix(config), as_floats=True)
