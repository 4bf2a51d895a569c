"""Reads GGUF files. Metadata is parsed here, since the `gguf` package's reader takes seconds for a large vocabulary;
tensors are dequantised by `gguf.quants`.
"""

import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float

from foretell.model.load.mapped_file import map_file, release_pages
from foretell.model.matrices.stored import BLOCKS, FLOAT_KINDS, Kind, StoredMatrix

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KIND_OF_TYPE: Mapping[int, Kind] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    30: "BF16", 39: "MXFP4",
}  # fmt: skip
"""The known storage types by their numbers in the file; the `gguf` package, which takes time to import, knows more."""


def _block_size(ggml_type: int) -> tuple[int, int]:
    """Numbers and bytes of a block.

    Raises:
        ValueError: an unknown type.
    """
    if ggml_type in _KIND_OF_TYPE:
        return BLOCKS[_KIND_OF_TYPE[ggml_type]]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    return sizes


def _type_name(ggml_type: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(ggml_type).name if ggml_type in list(GGMLQuantizationType) else str(ggml_type)


def _levels_as_q8_0(blocks: np.ndarray, ggml_type: int) -> tuple[Kind, np.ndarray]:
    """Blocks of IQ4_NL, whose levels are integers of 8 bits."""
    from gguf.quants import IQ4_NL

    levels = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
    return "Q8_0", np.concatenate([blocks[:, :2], np.array(IQ4_NL.kvalues, np.int8)[levels].view(np.uint8)], 1)


def _ternary_as_q4_0(blocks: np.ndarray, ggml_type: int) -> tuple[Kind, np.ndarray]:
    """Blocks of 256 numbers -1, 0 or 1 with a scale at their end (TQ1_0, TQ2_0)."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    plain, scales = blocks.copy(), np.repeat(blocks[:, -2:], 8, 0)
    plain[:, -2:] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    levels = (dequantize(plain, GGMLQuantizationType(ggml_type)) + 8).astype(np.uint8).reshape(-1, 32)
    return "Q4_0", np.concatenate([scales, levels[:, :16] | levels[:, 16:] << 4], 1)


_REPACKED = {20: _levels_as_q8_0, 34: _ternary_as_q4_0, 35: _ternary_as_q4_0}
"""What makes blocks of another kind, which has the same numbers, of those of a type by its number in the file."""


@dataclass(frozen=True)
class TensorInfo:
    """Location and storage type of a tensor in the file; `shape` in torch's order, outermost first."""

    shape: tuple[int, ...]
    ggml_type: int
    """A `GGMLQuantizationType`."""
    offset: int
    part: int = 0
    """Which of the files it is in."""


class _Cursor:
    """Reads consecutive little-endian values."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if self.position + size > len(self.data):
            raise struct.error("string past the end")
        raw = self.data[self.position : self.position + size]
        self.position += size
        return raw.decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Consecutive strings; a vocabulary has many."""
        data, position, end, size_of = self.data, self.position, len(self.data), struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            first = position + 8
            position = first + size_of(data, position)[0]
            if position > end:
                raise struct.error("string past the end")
            texts.append(data[first:position].decode("utf-8", errors="replace"))
        self.position = position
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, size = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                values = struct.unpack_from(f"<{size}{_SCALARS[inner]}", self.data, self.position)
                self.position += struct.calcsize(f"<{size}{_SCALARS[inner]}")
                return list(values)
            return self.strings(size) if inner == _STRING else [self.value(inner) for _ in range(size)]
        return self.scalar(_SCALARS[kind])


class GGUF:
    """A GGUF file (versions 2 and 3), or one that is split in parts, by its first: metadata by key, tensors by name.

    Raises:
        ValueError: the file is not a GGUF file, truncated or damaged, or a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, _parts(path, 1)
        self._data = list[mmap.mmap]()
        self.metadata, self.tensors = self._open(path, 0)
        count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or count < 2:
            return
        self.files, tensors = _parts(path, count), dict(self.tensors)
        for part, file in enumerate(self.files[1:], 1):
            _, more = self._open(file, part)
            tensors |= more
        self.tensors = tensors

    def _open(self, path: Path, part: int) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        """Map one of the files; its metadata and its tensors."""
        size = path.stat().st_size
        if size < 24:
            raise ValueError(f"{path}: not a GGUF file ({size} bytes); is the download complete?")
        data = map_file(path)
        self._data.append(data)
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (it starts with {bytes(data[:4])!r})")
        try:
            metadata, tensors = self._read(cursor, part)
        except (struct.error, KeyError, ValueError, ZeroDivisionError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{path}: damaged GGUF file near byte {cursor.position} of {size}: {error}; download it again"
            ) from error
        number = metadata.get("split.no", part)
        if number != part:
            raise ValueError(
                f"{path}: part {part + 1} of a split GGUF file is needed here, and this is part {number + 1}; name "
                "the first part, which ends in -00001-of- and their number"
            )
        for name, entry in tensors.items():
            self._check(name, entry)
        return metadata, tensors

    def _read(self, cursor: _Cursor, part: int) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        tensors, keys = cursor.scalar("Q"), cursor.scalar("Q")
        meta = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(keys)}
        entries = {}
        for _ in range(tensors):
            name = cursor.string()
            shape = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            entries[name] = TensorInfo(tuple(reversed(shape)), cursor.scalar("I"), cursor.scalar("Q"))
        align = int(meta.get("general.alignment", 32))
        base = -(-cursor.position // align) * align
        return meta, {n: TensorInfo(e.shape, e.ggml_type, base + e.offset, part) for n, e in entries.items()}

    def _check(self, name: str, e: TensorInfo) -> None:
        try:
            per_block, _ = _block_size(e.ggml_type)
        except (KeyError, ValueError) as error:
            raise self._unsupported(name, e) from error
        if e.shape and e.shape[-1] % per_block:
            raise ValueError(
                f"{self.path}: rows of {e.shape[-1]} numbers in the tensor {name} are no whole blocks of {per_block}, "
                f"as its type {_type_name(e.ggml_type)} needs; download it again"
            )
        if e.offset + self._bytes(e) > len(self._data[e.part]):
            raise ValueError(
                f"{self.path}: damaged GGUF file: the tensor {name} reaches past its end; download it again"
            )

    def _unsupported(self, name: str, e: TensorInfo) -> ValueError:
        return ValueError(
            f"{self.path}: the tensor {name} has the type {_type_name(e.ggml_type)}, which is not supported; take a "
            f"file of {', '.join(_KIND_OF_TYPE.values())}"
        )

    @staticmethod
    def _bytes(e: TensorInfo) -> int:
        per_block, block_bytes = _block_size(e.ggml_type)
        return int(prod(e.shape) // per_block * block_bytes)

    def release_pages(self) -> None:
        """Return the file's memory pages to the system; they are read again when needed."""
        for data in self._data:
            release_pages(data)

    @property
    def storage(self) -> Literal["quantized", "float32", "half"]:
        """How the matrices of the blocks are stored, most of them."""
        types = [e.ggml_type for n, e in self.tensors.items() if n.startswith("blk.") and len(e.shape) > 1]
        kinds = Counter(FLOAT_KINDS.get(_KIND_OF_TYPE.get(t, "Q8_0")) for t in types)
        most = kinds.most_common(1)[0][0] if kinds else torch.float32
        return "quantized" if most is None else "float32" if most == torch.float32 else "half"

    def maps(self, name: str) -> bool:
        """Whether a tensor is of a type that `Kind` has."""
        return self.tensors[name].ggml_type in _KIND_OF_TYPE

    def stored_matrix(self, name: str, expert: int | None = None) -> StoredMatrix | None:
        """A view of the file's bytes of a matrix, or of one expert's matrix in a tensor of all. Types that `Kind` does
        not have become one that it has, if that has all of their numbers. None: not a matrix, or of another type.
        """
        e = self._part(name, expert)
        kind, repack = _KIND_OF_TYPE.get(e.ggml_type), _REPACKED.get(e.ggml_type)
        if len(e.shape) != 2 or (kind is None and repack is None):
            return None
        if kind is None and repack is not None:
            blocks = np.frombuffer(self._data[e.part], np.uint8, self._bytes(e), e.offset)
            kind, blocks = repack(blocks.reshape(-1, _block_size(e.ggml_type)[1]), e.ggml_type)
            return StoredMatrix(kind, e.shape[1], torch.from_numpy(blocks.reshape(e.shape[0], -1)), self.release_pages)
        assert kind is not None
        raw = torch.frombuffer(self._data[e.part], dtype=torch.uint8, count=self._bytes(e), offset=e.offset)
        return StoredMatrix(kind, e.shape[1], raw.view(e.shape[0], -1), self.release_pages)

    def load_tensor(self, name: str, expert: int | None = None) -> Float[torch.Tensor, "*shape"]:
        """Load a tensor, or one expert's part of it, dequantised to float32."""
        e = self._part(name, expert)
        raw = np.frombuffer(self._data[e.part], np.uint8, self._bytes(e), e.offset)
        kind = _KIND_OF_TYPE.get(e.ggml_type)
        if kind == "F32":
            return torch.from_numpy(raw.view(np.float32).reshape(e.shape).copy())
        if kind == "F16":
            return torch.from_numpy(raw.view(np.float16).reshape(e.shape).astype(np.float32))
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = prod(e.shape[:-1])
        try:
            wide = dequantize(raw.reshape(rows, -1), GGMLQuantizationType(e.ggml_type))
        except NotImplementedError as error:
            raise self._unsupported(name, e) from error
        return torch.from_numpy(wide.reshape(e.shape))

    def _part(self, name: str, expert: int | None) -> TensorInfo:
        """Where a tensor is, or one expert's part of it.

        Raises:
            ValueError: the tensor has no such part.
        """
        e = self.tensors[name]
        if expert is None:
            return e
        if len(e.shape) < 2 or expert >= e.shape[0]:
            raise ValueError(f"{self.path}: {name} of shape {e.shape} has no part for expert {expert}")
        part = replace(e, shape=e.shape[1:])
        return replace(part, offset=e.offset + expert * self._bytes(part))


_PART = re.compile(r"-00001-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""How the name of the first part of a split file ends."""


def _parts(path: Path, count: int) -> list[Path]:
    """The files of a file that is split in `count` parts, of which `path` is the first.

    Raises:
        ValueError: one is missing, or the name does not say that it is the first.
    """
    if count < 2:
        return [path]
    match = _PART.search(path.name)
    if match is None or int(match[1]) != count:
        raise ValueError(
            f"{path}: the first of {count} parts of a split GGUF file, and its name does not end in "
            f"-00001-of-{count:05}.gguf, by which the others are known; give the parts their own names again"
        )
    files = [
        path.with_name(f"{path.name[: match.start()]}-{i:05}-of-{match[1]}{match[2]}") for i in range(1, count + 1)
    ]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise ValueError(f"{missing}: a part of a split GGUF file is not here; download it, too")
    return files
