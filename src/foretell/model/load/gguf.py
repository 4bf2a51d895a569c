"""Reads the tensors of GGUF files, which `gguf.quants` dequantises."""

from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from foretell.model.load.gguf_header import KIND_OF_TYPE, GGUFHeader, TensorInfo, block_size
from foretell.model.load.nearest_blocks import Nearest, nearest_of
from foretell.model.matrices.stored import FLOAT_KINDS, MadeRows, StoredMatrix, read_mapped, widen_q8_0

_NUMBERS = 1 << 18
"""Numbers that become other blocks at a time: fewer stay in the cache, more let threads wait less for each other."""


class GGUF(GGUFHeader):
    """A GGUF file with its tensors."""

    @property
    def storage(self) -> Literal["quantized", "float32", "half"]:
        """How the matrices of the blocks are stored, most of them."""
        types = [e.ggml_type for n, e in self.tensors.items() if n.startswith("blk.") and len(e.shape) > 1]
        kinds = Counter(FLOAT_KINDS.get(KIND_OF_TYPE.get(t, "Q8_0")) for t in types)
        most = kinds.most_common(1)[0][0] if kinds else torch.float32
        return "quantized" if most is None else "float32" if most == torch.float32 else "half"

    def maps(self, name: str) -> bool:
        """Whether a tensor is of a type that `Kind` has."""
        return self.tensors[name].ggml_type in KIND_OF_TYPE

    def stored_matrix(self, name: str, expert: int | None = None, factor: float = 1.0) -> StoredMatrix | None:
        """A view of the file's bytes of a matrix, or of one expert's matrix in a tensor of all. Types that `Kind` does
        not have become the nearest one, times `factor`. None: not a matrix, or of a type that has to be widened.
        """
        e = self._part(name, expert)
        if len(e.shape) != 2:
            return None
        nearest = nearest_of(e.ggml_type)
        if nearest is not None:
            made = MadeRows(e.shape[0], partial(self._as_nearest, e, nearest, factor))
            return StoredMatrix(nearest.kind, e.shape[1], made)
        if e.ggml_type not in KIND_OF_TYPE or factor != 1:
            return None
        kind = KIND_OF_TYPE[e.ggml_type]
        data = torch.frombuffer(self.mapped[e.part], dtype=torch.uint8, count=self.byte_count(e), offset=e.offset)
        return StoredMatrix(kind, e.shape[1], data.view(e.shape[0], -1), self.mapped)

    def _as_nearest(
        self, e: TensorInfo, nearest: Nearest, factor: float, first: int, last: int
    ) -> UInt8[np.ndarray, "n bytes"]:
        """Rows of a matrix as the nearest blocks, made of a few at a time."""
        (rows, inputs), (per_block, size) = e.shape, block_size(e.ggml_type)
        raw = self._raw(replace(e, shape=(last - first, inputs), offset=e.offset + first * self.byte_count(e) // rows))
        raw, step = raw.reshape(-1, size), _NUMBERS // per_block
        parts = [nearest.convert(raw[i : i + step], factor) for i in range(0, len(raw), step)]
        return np.concatenate(parts).reshape(last - first, -1)

    def load_tensor(self, name: str, expert: int | None = None) -> Float[torch.Tensor, "*shape"]:
        """Load a tensor, or one expert's part of it, dequantised to float32."""
        e = self._part(name, expert)
        raw, kind = self._raw(e), KIND_OF_TYPE.get(e.ggml_type)
        if kind == "F32":
            return torch.from_numpy(raw.view(np.float32).reshape(e.shape).copy())
        if kind == "F16":
            return torch.from_numpy(raw.view(np.float16).reshape(e.shape).astype(np.float32))
        if kind == "Q8_0":
            return widen_q8_0(torch.from_numpy(raw)).reshape(e.shape)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = prod(e.shape[:-1])
        try:
            wide = dequantize(raw.reshape(rows, -1), GGMLQuantizationType(e.ggml_type))
        except NotImplementedError as error:
            raise self._unsupported(name, e) from error
        return torch.from_numpy(wide.reshape(e.shape))

    def integers(self, name: str) -> Int[torch.Tensor, " n"]:
        """Load a tensor of 64-bit integers."""
        e = self.tensors[name]
        return torch.from_numpy(self._raw(e).view(np.int64).reshape(e.shape).copy())

    def stored_rows(self, name: str) -> UInt8[np.ndarray, "*rows bytes"]:
        """The bytes of a tensor as the file stores them, for one use."""
        shape = self.tensors[name].shape
        return self._raw(self.tensors[name]).reshape(*shape[:-1], -1)

    def _raw(self, e: TensorInfo) -> UInt8[np.ndarray, " bytes"]:
        """The bytes of a tensor, for one use."""
        mapped = torch.frombuffer(self.mapped[e.part], dtype=torch.uint8, count=self.byte_count(e), offset=e.offset)
        raw: np.ndarray = read_mapped(mapped, self.mapped).numpy()
        return raw

    def _part(self, name: str, expert: int | None) -> TensorInfo:
        """Where a tensor is, or one expert's part of it."""
        e = self.tensors[name]
        if expert is None:
            return e
        if len(e.shape) < 2 or expert >= e.shape[0]:
            raise ValueError(f"{self.path}: {name} of shape {e.shape} has no part for expert {expert}")
        part = replace(e, shape=e.shape[1:])
        return replace(part, offset=e.offset + expert * self.byte_count(part))
