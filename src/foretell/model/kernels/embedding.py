"""The token embedding of a decoder on the CPU kernels."""

from functools import cached_property

import torch
from jaxtyping import Float, Int

from foretell.model.kernels import build, structures
from foretell.model.kernels.linear import NativeLinear, pack_embedding
from foretell.model.kernels.pack import ROW_TYPES
from foretell.model.kernels.structures import PANEL_KINDS
from foretell.model.stored_matrix import StoredMatrix


class NativeEmbedding:
    """Rows of a stored matrix, widened when they are looked up, or of the packed head where the two are tied.

    `dtype`: what the numbers are rounded to before they become float32, which it may be, or bfloat16. `scale`: factor
    on every row. `mapped`: the matrix is a view of a file, so that rows take memory of the system's page cache only.

    Raises:
        ValueError: the head is quantised.
    """

    def __init__(
        self, source: StoredMatrix | NativeLinear, dtype: torch.dtype, scale: float, mapped: bool = False
    ) -> None:
        self.source, self.mapped, self._scale, self._kernels = source, mapped, scale, build.library()
        rounds = dtype == torch.bfloat16
        self.rows = _packed_rows(source, scale) if isinstance(source, NativeLinear) else _rows(source, rounds, scale)
        """The argument of the kernels that look rows up; points into the memory of `source`."""

    def __call__(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32.

        Raises:
            IndexError: a token does not exist.
        """
        return self._look_up(self.rows, token)

    def _look_up(self, rows: structures.EmbeddingRows, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        token, out = token.to(torch.int64).contiguous(), torch.empty(len(token), rows.width)
        invalid = self._kernels.foretell_embed(rows, token.data_ptr(), len(token), out.data_ptr())
        if invalid >= 0:
            raise self.unknown_token(int(token[invalid]))
        return out

    def unknown_token(self, token: int) -> IndexError:
        """The error that a token does not exist."""
        return IndexError(f"tokens must lie in 0 .. {self.rows.vocab - 1}, found {token}")

    @cached_property
    def _table(self) -> tuple[torch.Tensor, structures.Embedding]:
        plain = structures.EmbeddingRows.from_buffer_copy(self.rows)
        plain.scale = 1
        whole = self._look_up(plain, torch.arange(self.source.outputs))
        return pack_embedding(whole.bfloat16() if plain.rounds else whole, self._scale)

    @property
    def struct(self) -> structures.Embedding:
        """The whole table as an argument of the kernels; the first access widens it."""
        return self._table[1]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds beside the head."""
        return 0 if isinstance(self.source, NativeLinear) or self.mapped else self.source.data.nbytes


def _rows(source: StoredMatrix, rounds: bool, scale: float) -> structures.EmbeddingRows:
    kind = "F32" if source.kind in ROW_TYPES else source.kind
    row_type = ROW_TYPES.index(source.kind) if source.kind in ROW_TYPES else 0
    return structures.EmbeddingRows(
        *(source.data.data_ptr(), source.data.stride(0), PANEL_KINDS.index(kind), row_type),
        *(source.outputs, source.inputs, rounds, scale),
    )


def _packed_rows(source: NativeLinear, scale: float) -> structures.EmbeddingRows:
    if not source.holds_floats:
        raise ValueError(f"rows of a {PANEL_KINDS[source.struct.kind]} weight cannot be read back")
    rounds = source.struct.kind == PANEL_KINDS.index("BF16")
    return structures.EmbeddingRows(
        *(source.struct.words, 0, source.struct.kind, 0, source.outputs, source.inputs, rounds, scale)
    )
