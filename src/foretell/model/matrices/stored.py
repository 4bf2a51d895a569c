"""Matrices as their checkpoint stores them: rows of quantised blocks, or of floats. They are widened on request."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from foretell.model.matrices.kinds import BLOCKS, Kind

FLOAT_KINDS: dict[Kind, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of the kinds that are not quantised."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [outputs, inputs] in the bytes of its checkpoint, often a view of a mapped file."""

    kind: Kind
    inputs: int
    data: UInt8[torch.Tensor, "o bytes"]
    """The rows, a whole number of blocks each."""
    release_pages: Callable[[], None] | None = field(default=None, compare=False)
    """Returns the pages of the mapped file that the rows come from to the system; they are read again when needed."""

    def __post_init__(self) -> None:
        per_block, size = BLOCKS[self.kind]
        if self.inputs % per_block or self.data.shape[1] != self.inputs // per_block * size:
            raise ValueError(
                f"a {self.kind} matrix of {self.inputs} inputs needs rows of whole blocks of {per_block}, "
                f"found rows of {self.data.shape[1]} bytes"
            )

    @classmethod
    def of(cls, tensor: Float[torch.Tensor, "o i"], release_pages: Callable[[], None] | None = None) -> "StoredMatrix":
        """A float tensor as it is; float64 becomes float32."""
        kinds = {dtype: kind for kind, dtype in FLOAT_KINDS.items()}
        tensor = tensor.detach().contiguous()
        if tensor.dtype not in kinds:
            tensor = tensor.float()
        raw = tensor.view(torch.uint8).view(len(tensor), -1)
        return cls(kinds[tensor.dtype], tensor.shape[1], raw, release_pages)

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return len(self.data)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.outputs, self.inputs

    @property
    def quantized(self) -> bool:
        """Whether the rows are blocks of integers with scales."""
        return self.kind not in FLOAT_KINDS

    def rows(self, index: Int[torch.Tensor, " n"]) -> "StoredMatrix":
        """The rows of these indices, copied."""
        chosen = np.take(self.data.numpy(), index.numpy(), 0)
        return StoredMatrix(self.kind, self.inputs, torch.from_numpy(chosen))

    def rounded(self, dtype: torch.dtype) -> "StoredMatrix":
        """The numbers rounded to bfloat16 or float32."""
        return StoredMatrix.of(self.widen().to(dtype))

    def widen(self) -> Float[torch.Tensor, "o i"]:
        """The numbers: of a quantised matrix in float32, as `gguf.quants` computes them; else in the stored dtype."""
        if not self.quantized:
            return self.data.view(FLOAT_KINDS[self.kind])
        data = np.ascontiguousarray(self.data.numpy())
        if self.kind == "Q4_Z":
            return _widen_q4_z(data)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(data, GGMLQuantizationType[self.kind]).reshape(self.shape))


def _widen_q4_z(data: np.ndarray) -> Float[torch.Tensor, "o i"]:
    blocks = data.reshape(-1, BLOCKS["Q4_Z"][1])
    scale, zero = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    levels = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).astype(np.float32)
    return torch.from_numpy((scale * (levels - zero)).reshape(len(data), -1))


Matrix = torch.Tensor | StoredMatrix
"""A matrix [out, in] in any float dtype, or as its checkpoint stores it."""


def widened(matrix: Matrix) -> Float[torch.Tensor, "o i"]:
    """The numbers of a matrix: of a quantised one in float32, else in the dtype that it has."""
    return matrix.widen() if isinstance(matrix, StoredMatrix) else matrix.detach()
