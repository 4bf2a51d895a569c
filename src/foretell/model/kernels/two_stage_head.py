"""Output heads in two stages: all outputs through a low rank, and the best ones again with their exact rows."""

import ctypes

from jaxtyping import Float
from torch import Tensor

from foretell.model.kernels import structures
from foretell.model.kernels.linear import NativeLinear, set_factor
from foretell.model.kernels.rows import floats, in_huge_pages, row_tensor
from foretell.model.kernels.structures import OPERANDS, Precision
from foretell.model.matrices.stored import Matrix


class TwoStageHead(NativeLinear):
    """Scores of `v` tokens for inputs of width `d`: those of `outer @ inner`, [v, r] and [r, d], and where these are
    among the best `count` of an input (or a few more), those of `exact`, [v, d], in float32 or bfloat16.

    Raises:
        RuntimeError: the kernels are not available here.
    """

    def __init__(self, outer: Matrix, inner: Matrix, exact: Float[Tensor, "v d"], count: int, dtype: Precision) -> None:
        super().__init__(outer, None, dtype)
        self.inputs = inner.shape[1]
        self._inner = NativeLinear(inner, None, dtype)
        row_precision = floats(dtype)
        self._rows = in_huge_pages(row_tensor(exact, row_precision))
        self._exact = structures.ExactRows(
            rows=self._rows.data_ptr(),
            row_words=self._rows.nbytes // len(self._rows) // 4,
            operand=OPERANDS.index(row_precision),
            count=count,
        )
        self._factor = self._inner.struct
        set_factor(self.struct, ctypes.addressof(self._factor))
        self.struct.exact = ctypes.addressof(self._exact)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return super().nbytes + self._inner.nbytes + self._rows.nbytes

    @property
    def holds_floats(self) -> bool:
        """False: rows of the low rank are of no use."""
        return False
