"""The token embedding of a decoder on the CPU kernels."""

from ctypes import addressof, c_char
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.kernels import build, structures
from foretell.model.kernels.linear import NativeLinear, pack_embedding
from foretell.model.kernels.pack import widen_quantized_rows
from foretell.model.matrices.stored import StoredMatrix


class NativeEmbedding:
    """Rows of a stored matrix, widened when they are looked up, or of the packed head where the two are tied.

    `dtype`: what the numbers are rounded to before they become float32, which it may be, or bfloat16. `scale`: factor
    on every row. `mapped`: the matrix is a view of a file, so that rows take memory of the system's page cache only.
    """

    def __init__(
        self, source: StoredMatrix | NativeLinear, dtype: torch.dtype, scale: float, mapped: bool = False
    ) -> None:
        self.source, self.mapped, self._dtype, self._scale = source, mapped, dtype, scale
        self._kernels, self._outputs = build.library(), source.outputs

    def __call__(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32."""
        x = self._rows(token).float()
        return x if self._scale == 1 else x * self._scale

    def write(self, token: Int[np.ndarray, " t"], out: Float[np.ndarray, "t d"]) -> None:
        """Write the input of the first block to `out`, float32."""
        if isinstance(self.source, StoredMatrix) and self.source.quantized:
            self._widen(self.source, token.tolist(), addressof(c_char.from_buffer(out)))
        else:
            out[...] = self._rows(torch.from_numpy(token)).float().numpy()
        if self._scale != 1:
            out *= self._scale

    def _rows(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        if isinstance(self.source, NativeLinear):
            return self.source.gather_rows(token)
        source = self.source
        if not source.quantized:
            return source.rows(token).widen().to(self._dtype)
        out = torch.empty(len(token), source.inputs)
        self._widen(source, token.tolist(), out.data_ptr())
        return out

    def _widen(self, source: StoredMatrix, tokens: list[int], address: int) -> None:
        """Write rows of a quantised matrix, rounded, to an address."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._outputs:
            raise IndexError(f"tokens must lie in 0 .. {self._outputs - 1}, found {tokens}")
        widen_quantized_rows(source, tokens, self._kernels, address, rounded=self._dtype == torch.bfloat16)

    @cached_property
    def _table(self) -> tuple[torch.Tensor, structures.Embedding]:
        whole = self._rows(torch.arange(self.source.outputs)).to(self._dtype)
        return pack_embedding(whole, self._scale)

    @property
    def struct(self) -> structures.Embedding:
        """The argument of the kernels; the first access widens the whole table."""
        return self._table[1]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds beside the head."""
        return 0 if isinstance(self.source, NativeLinear) or self.mapped else self.source.data.nbytes
