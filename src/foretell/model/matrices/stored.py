"""Matrices as their checkpoint stores them: rows of quantised blocks, or of floats. They are widened on request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from foretell.model.matrices.kinds import BLOCKS, Kind
from foretell.model.matrices.mapped_file import MappedFile

FLOAT_KINDS: dict[Kind, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of the kinds that are not quantised."""


def read_mapped(rows: UInt8[torch.Tensor, "..."], mapped: Sequence[MappedFile]) -> UInt8[torch.Tensor, "..."]:
    """Rows that one of these files may map: read from it, or as they are where they are in memory."""
    for file in mapped if rows.is_contiguous() else ():
        if (raw := file.read_at(rows.data_ptr(), rows.nbytes)) is not None:
            return torch.from_numpy(raw).view(rows.shape)
    return rows


@dataclass(frozen=True)
class MadeRows:
    """Rows that are made when they are asked for."""

    outputs: int
    make: Callable[[int, int], UInt8[np.ndarray, "n bytes"]]
    """Gives rows from the first number up to, and without, the second."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [outputs, inputs] in the bytes of its checkpoint, often a view of a mapped file."""

    kind: Kind
    inputs: int
    held: UInt8[torch.Tensor, "o bytes"] | MadeRows
    """The rows, a whole number of blocks each."""
    mapped: Sequence[MappedFile] = field(default=(), compare=False)
    """The mapped files, of which one holds the rows."""
    as_floats: bool = False
    """Whether the kernels get the numbers as floats, of a quantised matrix too."""

    def __post_init__(self) -> None:
        per_block, size = BLOCKS[self.kind]
        width = self.held.shape[1] if isinstance(self.held, torch.Tensor) else self.inputs // per_block * size
        if self.inputs % per_block or width != self.inputs // per_block * size:
            raise ValueError(
                f"a {self.kind} matrix of {self.inputs} inputs needs rows of whole blocks of {per_block}, "
                f"found rows of {width} bytes"
            )

    @cached_property
    def data(self) -> UInt8[torch.Tensor, "o bytes"]:
        """All rows."""
        return self.held if isinstance(self.held, torch.Tensor) else torch.from_numpy(self.held.make(0, self.outputs))

    def read_rows(self, first: int, last: int) -> UInt8[torch.Tensor, "n bytes"]:
        """Some rows, for one use: made, or read from the file, unless they are in memory."""
        if not isinstance(self.held, torch.Tensor):
            return torch.from_numpy(self.held.make(first, last))
        return read_mapped(self.held[first:last], self.mapped)

    @classmethod
    def of(cls, tensor: Float[torch.Tensor, "o i"], mapped: Sequence[MappedFile] = ()) -> "StoredMatrix":
        """A float tensor as it is; float64 becomes float32."""
        kinds = {dtype: kind for kind, dtype in FLOAT_KINDS.items()}
        tensor = tensor.detach().contiguous()
        if tensor.dtype not in kinds:
            tensor = tensor.float()
        raw = tensor.view(torch.uint8).view(len(tensor), -1)
        return cls(kinds[tensor.dtype], tensor.shape[1], raw, mapped)

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return len(self.held) if isinstance(self.held, torch.Tensor) else self.held.outputs

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.outputs, self.inputs

    @property
    def quantized(self) -> bool:
        """Whether the rows are blocks of integers with scales."""
        return self.kind not in FLOAT_KINDS

    def rows(self, index: Int[torch.Tensor, " n"]) -> "StoredMatrix":
        """The rows of these indices, read when they are asked for."""

        def chosen(first: int, last: int) -> UInt8[np.ndarray, "n bytes"]:
            own = index[first:last]
            least, most = (int(own.min()), int(own.max()) + 1) if len(own) else (0, 0)
            if most - least > 2 * len(own):
                return np.take(self.data.numpy(), own.numpy(), 0)
            return np.take(self.read_rows(least, most).numpy(), own.numpy() - least, 0)

        return StoredMatrix(self.kind, self.inputs, MadeRows(len(index), chosen), self.mapped)

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
        if self.kind == "NVFP4":
            return _widen_nvfp4(data)
        if self.kind == "Q8_0":
            return widen_q8_0(self.data).reshape(self.shape)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(data, GGMLQuantizationType[self.kind]).reshape(self.shape))


def widen_q8_0(data: UInt8[torch.Tensor, "..."]) -> Float[torch.Tensor, " n"]:
    """The numbers of blocks of Q8_0, as `gguf.quants` computes them, which takes several times as long."""
    blocks = data.reshape(-1, BLOCKS["Q8_0"][1])
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float().mul_(scales).flatten()


def _widen_q4_z(data: np.ndarray) -> Float[torch.Tensor, "o i"]:
    blocks = data.reshape(-1, BLOCKS["Q4_Z"][1])
    scale, zero = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    levels = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).astype(np.float32)
    return torch.from_numpy((scale * (levels - zero)).reshape(len(data), -1))


def _widen_nvfp4(data: np.ndarray) -> Float[torch.Tensor, "o i"]:
    from gguf.quants import NVFP4

    blocks = data.reshape(-1, BLOCKS["NVFP4"][1])
    bits = blocks[:, 4:8].astype(np.uint32) << 20  # the exponent begins at bit 23; halved, as levels are doubled
    small, large = ((bits + np.uint32(exponent << 23)).view(np.float32) for exponent in (120, 119))
    scale = np.where(bits < 1 << 23, small - np.float32(2**-7), large) * blocks[:, :4].copy().view(np.float32)
    nibbles = blocks[:, 8:].reshape(-1, 4, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & 15
    levels = np.take(np.array(NVFP4.kvalues, np.float32), nibbles.reshape(-1, 4, 16))
    return torch.from_numpy((scale[..., None] * levels).reshape(len(data), -1))


Matrix = torch.Tensor | StoredMatrix
"""A matrix [out, in] in any float dtype, or as its checkpoint stores it."""


def widened(matrix: Matrix) -> Float[torch.Tensor, "o i"]:
    """The numbers of a matrix: of a quantised one in float32, else in the dtype that it has."""
    return matrix.widen() if isinstance(matrix, StoredMatrix) else matrix.detach()
